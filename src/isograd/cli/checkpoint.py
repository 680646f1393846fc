"""isograd ckpt: the command line. Nothing but argparse is imported before a command needs it."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isograd.cli.subcommands import Verb, in_bytes, number, run
from isograd.io import terminal

if TYPE_CHECKING:
    from isograd.checkpoint.manifest import Saved
    from isograd.checkpoint.read import Reader

EXAMPLES = """examples:
  isograd ckpt inspect run/checkpoints                          the newest of a run
  isograd ckpt inspect run/checkpoints/step-00000100 --tensors '*embed*'
  isograd ckpt verify run/checkpoints
  isograd ckpt diff run/checkpoints/step-00000100 other/checkpoints/step-00000100
  isograd ckpt convert run/checkpoints out/ --tokenizer my_model/ --dtype bf16
  isograd ckpt convert run/checkpoints out/ --tokenizer my_model/ --gguf q8_0
  isograd ckpt convert run/checkpoints out/ --push-to-hub me/my-model
  isograd ckpt import outputs/checkpoint/step-100 out/ --config my_model/

exit codes: 0 well, 2 wrong usage, 3 damaged (verify) or different (diff)"""
DTYPES = ("fp32", "bf16", "fp16", "fp64")
PLACE = "a checkpoint, or the newest of a run or of a folder of checkpoints, also in a store: s3://bucket/run"

ABOUT = "Checkpoints: what is in them, whether they are whole, how two differ, to Hugging Face, and from others."


def main(words: list[str]) -> int:
    """`isograd ckpt`: run one of its commands; the exit code."""
    return run(words, "ckpt", ABOUT, EXAMPLES, VERBS)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="PLACE", help=PLACE)
    parser.add_argument("--tensors", nargs="?", const="*", metavar="PATTERN", help="list tensors, such as '*embed*'")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _inspect(options: argparse.Namespace) -> int:
    from isograd.checkpoint.read import open_whole

    reader = open_whole(options.place)
    facts = _facts(reader)
    if options.json:
        print(json.dumps(facts | {"tensors": _tensors(reader, options.tensors)}, indent=1))
        return 0
    columns = terminal.width(10_000)
    for name, value in facts.items():
        print(terminal.fold(f"{name:<10} {terminal.plain(value if isinstance(value, str) else _flat(value))}", columns))
    rows = [row | {"name": terminal.plain(row["name"])} for row in _tensors(reader, options.tensors)]
    wide = max((len(row["name"]) for row in rows), default=0)
    wide = max(20, min(wide, columns - 34))
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "1"
        print(terminal.fold(f"  {row['name']:<{wide}}  {row['dtype']:<4}  {shape:<16}  {row['pieces']}", columns))
    return 0


def _facts(reader: Reader) -> dict[str, Any]:
    from isograd.checkpoint.files import TORCH

    manifest = reader.manifest
    kinds: dict[str, list[Saved]] = {}
    for key, saved in manifest.tensors.items():
        kinds.setdefault(key.partition("/")[0], []).append(saved)
    sums = {}
    for kind, of_kind in kinds.items():
        elements = [math.prod(saved.shape) for saved in of_kind]
        size = sum(n * TORCH[saved.dtype].itemsize for n, saved in zip(elements, of_kind, strict=True))
        dtypes = " ".join(sorted({saved.dtype for saved in of_kind}))
        sums[kind] = f"{len(of_kind)} tensors, {sum(elements):,} elements of {dtypes}, {in_bytes(size)}"
    groups = manifest.numbers["groups"]
    return {
        "place": str(reader.folder),
        "step": manifest.step,
        "layout": manifest.layout,
        "written by": ", ".join(f"{name} {version}" for name, version in manifest.written_by.items()),
        "files": f"{len(manifest.files)}, {in_bytes(sum(manifest.files.values()))}",
        **sums,
        "stepped by": [{"kind": g["kind"], "parameters": len(g["names"]), **g["options"]} for g in groups],
        "config": (manifest.model or {}).get("config", "of a model that is not known"),
        "extra": manifest.extra,
    }


def _tensors(reader: Reader, pattern: str | None) -> list[dict[str, Any]]:
    return [
        {"name": key, "dtype": saved.dtype, "shape": saved.shape, "pieces": len(saved.files)}
        for key, saved in reader.manifest.tensors.items()
        if pattern is not None and fnmatchcase(key, pattern)
    ]


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(inner)}" for name, inner in value.items()) or "-"
    return "; ".join(map(_flat, value)) if isinstance(value, list) else str(value)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="PLACE", help=PLACE)


def _verify(options: argparse.Namespace) -> int:
    from isograd.checkpoint.compare import damages
    from isograd.checkpoint.read import open_whole

    reader = open_whole(options.place)
    wrong, pieces = [], 0
    total = sum(len(saved.files) for saved in reader.manifest.tensors.values())
    for key, damage in damages(reader):
        pieces += 1
        if sys.stderr.isatty():
            doing = f"\rckpt: {pieces} of {total} pieces, {terminal.plain(key):<60.60}"
            print(doing, end="", file=sys.stderr, flush=True)
        if damage:
            wrong.append(damage)
    if sys.stderr.isatty():
        print("\r" + " " * 100, end="\r", file=sys.stderr)
    for damage in wrong:
        print(terminal.plain(damage))
    verdict = f"{len(wrong)} of {pieces} pieces are damaged" if wrong else f"whole: {pieces} pieces have their hashes"
    print(f"{reader.folder}: {verdict}")
    return 3 if wrong else 0


def _diff_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help=PLACE)
    parser.add_argument("second", metavar="B", help="another one")


def _diff(options: argparse.Namespace) -> int:
    from isograd.checkpoint.compare import differences
    from isograd.checkpoint.read import open_whole

    one, other = open_whole(options.first), open_whole(options.second)
    found = 0
    for difference in differences(one, other):
        found += 1
        print(terminal.plain(str(difference)))
    same = len(one.manifest.tensors.keys() & other.manifest.tensors.keys())
    print(f"{found} differences" if found else f"equal bit for bit: {same} tensors")
    return 3 if found else 0


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="PLACE", help=PLACE)
    parser.add_argument("--adapters", action="store_true", help="write the adapters (LoRA) alone, as a folder of peft")
    parser.add_argument("--ema", action="store_true", help="write the averages of the weights, in fp32 (config: ema)")
    parser.add_argument("--config", metavar="DIR", help="of another trainer's folder: one with its config.json")
    parser.add_argument("--gguf", choices=("f32", "f16", "q8_0"), help="also write a GGUF file, for llama.cpp")
    parser.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="also send it to the Hugging Face hub, private there"
    )
    _hugging_options(parser)


def _hugging_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument("--tokenizer", metavar="DIR", help="copy tokenizer files, and special tokens, from here")
    parser.add_argument(
        "--max-shard-gb", type=number(0.001, 1e6, float), default=5.0, help="of one safetensors file (default 5)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were trained)")


def _import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="DCP", help="a folder of DCP, DeepSpeed, Megatron-LM or GPT-NeoX")
    parser.add_argument("--states", metavar="DIR", help="of ZeRO: also write a checkpoint with Adam's states")
    parser.add_argument("--config", metavar="DIR", required=True, help="a folder with the model's config.json")
    parser.add_argument("--prefix", metavar="TEXT", help="what stands before the names of the weights, as 'model.'")
    _hugging_options(parser)


def _convert(options: argparse.Namespace) -> int:
    from isograd.checkpoint.folder import one_of
    from isograd.errors import ConfigError, IsogradError
    from isograd.hf.adapter_files import convert_adapters
    from isograd.hf.export import convert
    from isograd.hf.gguf_file import need_gguf, write_gguf
    from isograd.io.store import place_of

    if options.gguf is not None:
        need_gguf()  # before a folder is written, which a second try would find in its way
    if options.config is not None:
        return _import(argparse.Namespace(**vars(options), prefix=None, states=None))
    place = one_of(place_of(options.place))
    if options.adapters:
        if options.tokenizer or options.dtype or options.ema or options.gguf:
            raise ConfigError(
                "IG600", "--adapters writes adapters alone, as they were trained",
                seen="--tokenizer, --dtype, --ema or --gguf",
                fix="leave it out; without --adapters the whole model is written",
            )  # fmt: skip
        return _written(place, convert_adapters(place, options.out), options.push_to_hub)
    out = convert(
        place, options.out, tokenizer=options.tokenizer, max_shard_gb=options.max_shard_gb, ema=options.ema,
        dtype=_dtype(options.dtype),
    )  # fmt: skip
    if options.gguf is not None:
        try:
            write_gguf(out, options.gguf)
        except IsogradError:  # nothing is left, so that another command can have the name
            shutil.rmtree(out)
            raise
    code = _written(place, out, options.push_to_hub)
    if options.tokenizer is None and (known := _tokenizer_beside(place)) is not None:
        said = f"ckpt: no tokenizer is in {out}; the run's comes with it by"
        print(f"{said} isograd ckpt convert {options.place} OUT --tokenizer {known}", file=sys.stderr)
    return code


def _tokenizer_beside(place: Any) -> str | None:
    """The folder of the tokenizer that the run of a checkpoint was trained with, if one is found."""
    from isograd.errors import IsogradError
    from isograd.generate.writer import tokenizer_of

    try:
        found = tokenizer_of(place, None) if isinstance(place, Path) else "bytes"
    except IsogradError:
        return None
    return None if found == "bytes" else found


def _import(options: argparse.Namespace) -> int:
    from isograd.integrations.checkpoints.foreign import import_dcp

    read = import_dcp(
        options.place, options.out, config=options.config, prefix=options.prefix, tokenizer=options.tokenizer,
        max_shard_gb=options.max_shard_gb, dtype=_dtype(options.dtype), states=options.states,
    )  # fmt: skip
    print(f"read: names of {read.kind}" + (f" behind {read.prefix!r}" if read.prefix else ""))
    return _written(options.place, Path(options.out))


def _dtype(name: str | None) -> Any:
    from isograd.train.task import DTYPES as TYPES

    return TYPES[name] if name else None


def _written(place: object, out: Path, name: str | None = None) -> int:
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{place} -> {out}: {in_bytes(size)}, read again and compared", flush=True)
    if name is not None:
        from isograd.io import hub

        print(f"{out} -> {hub.push(out, name)}, private there")
    return 0


VERBS: dict[str, Verb] = {
    "inspect": ("show what a checkpoint holds", _inspect_options, _inspect),
    "verify": ("read everything and check every hash", _verify_options, _verify),
    "diff": ("name the tensors and rows in which two differ", _diff_options, _diff),
    "convert": ("write a Hugging Face folder, without ranks", _convert_options, _convert),
    "import": ("write one from a folder of DCP, DeepSpeed, Megatron-LM or GPT-NeoX", _import_options, _import),
}
