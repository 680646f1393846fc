"""Damaged and hostile files, made from whole ones by a seed: every reader answers with its value or one IsogradError.

    python -m tests.fuzz 100000            by hand; prints the seeds that end otherwise
    python -m tests.fuzz 1 --seed 4711     one of them again, with its traceback

A mutation changes a leaf of JSON (a hash over it is made right), swaps, drops or repeats a part, flips bits, cuts,
inserts, or puts a FIFO, a folder, a link, a Git LFS pointer or deep nesting in the file's place. Afterwards nothing in
the folder, and nothing that a link points to, may have changed, and no reader may take longer than LIMIT.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from xxhash import xxh3_128

from isograd.checkpoint import manifest as checkpoints
from isograd.checkpoint.compare import damages
from isograd.checkpoint.files import entry, raw_bytes, write_tensors
from isograd.checkpoint.folder import job_in
from isograd.checkpoint.read import open_whole
from isograd.cli.checkpoint import _facts
from isograd.data import Tokens, building, texts, tokenizer
from isograd.data.manifest import Recipe, Vocabulary
from isograd.data.pairs import Pairs
from isograd.errors import IsogradError
from isograd.hf.configs import load_config
from isograd.hf.export import damaged_if_unlike, plan
from isograd.integrations.checkpoints.dcp import DcpFolder
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.train import journal, reading
from isograd_verify.record import events
from isograd_verify.record.recording import Recording
from tests.data import toys
from verify.tests import recordings

LIMIT = 60.0  # seconds of one read: the slowest takes 0.3 of a core, which others may hold
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**30, -(10**30), 0.5, -0.0, 1e308, 5e-324,
    float("nan"), float("inf"), "", "x", "0", "\0", "\ud800", "../../victim", "/dev/zero", "a" * 5000, "F32", "train",
    "010", "1:30", ".inf", "2026-01-31", "%s{}", "\x1b[31m", [], [[]], {}, {"": {}}, [1, 2], ["x"], {"x": 1}, [None],
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A folder with a whole file, and what reads it."""

    make: Callable[[Path], str]  # fills a folder; the name of the file that is changed
    read: Callable[[Path], object]
    repair: Callable[[Path], object] = lambda folder: None  # makes hashes right after a change


# -- whole files -----------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path) -> str:
    home = folder / "step-00000007"
    home.mkdir()
    names = ("embed.weight", "norm.weight")
    tensors = {f"model/{n}": torch.arange(6.0).view(3, 2) + i for i, n in enumerate(names)}
    notes = []
    for rank, rows in enumerate((slice(0, 2), slice(2, 3))):
        mine = {key: tensor[rows].contiguous() for key, tensor in tensors.items()}
        file = f"rank-{rank:05d}.safetensors"
        size, _ = write_tensors(home / file, [entry(k, t) for k, t in mine.items()], mine.values(), {"format": "pt"})
        box = ((rows.start, rows.stop), (0, 2))
        listed = {key: ((3, 2), "F32", box, xxh3_128(raw_bytes(tensor)).hexdigest()) for key, tensor in mine.items()}
        counts = {"step": {name: [7.0, "float32"] for name in names}} if rank == 0 else {}
        notes.append({"file": file, "bytes": size, "tensors": listed, "counts": counts})
    config = {"vocab": 3, "hidden": 2, "layers": 1, "heads": 1, "mlp": 2}
    group = {"kind": "AdamW", "options": {"lr": 1e-3}, "names": list(names)}
    run = {"groups": [group], "counters": {}, "loss_scale": None}
    model = {"kind": "isograd", "config": config}
    head = {"step": 7, "layout": "dp2", "model": model, "extra": {"loss": 1.5}, "run": run}
    checkpoints.merge(notes, head).write(home)
    return "step-00000007/manifest.json"


def _hash_of_manifest(folder: Path) -> None:
    home = folder / "step-00000007"
    if (home / "manifest.json").is_file():
        digest = hashlib.sha256((home / "manifest.json").read_bytes()).hexdigest()
        (home / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


def _read_checkpoint(folder: Path) -> None:
    reader = open_whole(folder)
    _facts(reader)
    list(damages(reader))
    ours = {k: checkpoints_entry(k, saved) for k, saved in reader.manifest.tensors.items()}
    with damaged_if_unlike(folder):
        plan(reader.manifest.model or {"kind": "transformers"}, ours, 5.0, None)


def checkpoints_entry(key: str, saved: checkpoints.Saved) -> Any:
    from isograd.checkpoint.files import TensorEntry

    return TensorEntry(key, saved.dtype, saved.shape)


def _tokens(folder: Path) -> str:
    (folder / "in.txt").write_text("\n".join(toys.words(20)))
    building.build(folder / "tokens", [folder / "in.txt"], documents="line", validation=0.2, shard_bytes=300)
    return "tokens/manifest.json"


def _read_tokens(folder: Path) -> None:
    tokens = Tokens(folder / "tokens")
    tokens.read(0, min(5, tokens.tokens))
    tokens.ends(0, min(5, tokens.tokens))


def _recipe(folder: Path) -> str:
    _tokens(folder)
    found = json.loads((folder / "tokens/manifest.json").read_text())
    (folder / "tokens/building.json").write_text(json.dumps(found["recipe"]))
    return "tokens/building.json"


def _shards(folder: Path) -> str:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}, folder / "one.safetensors")
    save_file({"c": torch.ones(3, dtype=torch.bfloat16)}, folder / "two.safetensors")
    index = {"metadata": {"total_size": 38}, "weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "model.safetensors.index.json"


def _read_shards(folder: Path) -> None:
    found = SafetensorsReader(folder)
    for name, shape in found.shapes.items():
        found.read(name, shape, [(0, size) for size in shape])


def _recording(folder: Path) -> str:
    held = {"w": recordings.Held(torch.ones(2, 2), torch.ones(2, 2))}
    call = events.Collective(n=1, op="all_reduce", group=(0,), dtype="float32", numel=4, bytes=16, covers=("w",))
    more = [call, events.End(n=1, seconds=0.25)]
    recordings.write(folder / "recorded", [[recordings.Step(held, inputs=[torch.ones(2)], events=more)]])
    return "recorded/rank-0000/events.jsonl"


def _read_recording(folder: Path) -> None:
    found = Recording(folder / "recorded")
    assert isinstance(found.about, dict)
    for record in found.ranks:
        for step in record.steps:
            record.tensors(step)


def _config(folder: Path) -> str:
    found = {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": [1, 2],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(found))
    return "config.json"


def _run_config(folder: Path) -> str:
    shutil.copy(Path(__file__).parents[1] / "recipes" / "quickstart.yaml", folder / "run.yaml")
    return "run.yaml"


def _tokenizer(folder: Path) -> str:
    added = {"id": 3, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}  # fmt: skip
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    made = {"version": "1.0", "added_tokens": [added], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return "tokenizer.json"


def _read_tokenizer(folder: Path) -> None:
    found = tokenizer.find_tokenizer(str(folder))
    found.decode(found.encode(["a b c"])[0].tolist())


def _pairs(folder: Path) -> str:
    lines = [json.dumps({"a": word, "b": word[::-1]}) for word in toys.words(5)]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return "pairs.jsonl"


def _metrics(folder: Path) -> str:
    entries = [{"step": 1, "loss": 2.5}, {"step": 2, "event": "evaluation", "loss": 2.25, "weight": 3.0, "unit": "x"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    return "metrics.jsonl"


def _lock(folder: Path) -> str:
    (folder / "lock").write_text(json.dumps({"pid": 1, "host": "here", "started": "now", "job": "0123abcd"}))
    return "lock"


def _texts(folder: Path) -> str:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": word, "n": 1}) + "\n" for word in toys.words(5)))
    return "in.jsonl"


def _parquet(folder: Path) -> str:
    from pyarrow import parquet, table

    parquet.write_table(table({"text": toys.words(9), "n": list(range(9))}), folder / "in.parquet", row_group_size=4)
    return "in.parquet"


def _read_texts(folder: Path, name: str) -> None:
    vocabulary = Vocabulary("bytes", None, 257, 256)
    found = texts.find_inputs([str(folder / name)], folder / "out")
    recipe = Recipe(vocabulary, "file", "text", 0.0, 40, found)
    for parts in texts.cut(recipe):
        for part in parts:
            list(texts.read(recipe, part))
    list(texts.values(Path(found[0].path)))


def _dcp(folder: Path) -> str:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, checkpoint_id=folder / "dcp")
    return "dcp/.metadata"


def _read_dcp(folder: Path) -> None:
    found = DcpFolder(folder / "dcp")
    for name in found.tensors:
        found.full(name)


def _other(make: Callable[[Path], str], name: str) -> Callable[[Path], str]:
    """The same folder, another file of it."""

    def made(folder: Path) -> str:
        make(folder)
        return name

    return made


TARGETS: dict[str, Target] = {
    "checkpoint manifest": Target(_checkpoint, _read_checkpoint, _hash_of_manifest),
    "checkpoint tensors": Target(_other(_checkpoint, "step-00000007/rank-00001.safetensors"), _read_checkpoint),
    "data manifest": Target(_tokens, _read_tokens),
    "data tokens": Target(_other(_tokens, "tokens/train-00000.bin"), _read_tokens),
    "data ends": Target(_other(_tokens, "tokens/train-00000.ends"), _read_tokens),
    "build recipe": Target(_recipe, lambda folder: building._recipe(folder / "tokens")),
    "index": Target(_shards, _read_shards),
    "safetensors": Target(_other(_shards, "one.safetensors"), _read_shards),
    "events": Target(_recording, _read_recording),
    "rank": Target(_other(_recording, "recorded/rank-0000/rank.json"), _read_recording),
    "recorded tensors": Target(_other(_recording, "recorded/rank-0000/step-0001.safetensors"), _read_recording),
    "config.json": Target(_config, lambda folder: load_config(str(folder))),
    "run.yaml": Target(_run_config, lambda folder: reading.load(folder / "run.yaml")),
    "tokenizer.json": Target(_tokenizer, _read_tokenizer),
    "tokenizer_config.json": Target(_other(_tokenizer, "tokenizer_config.json"), _read_tokenizer),
    "pairs": Target(_pairs, lambda folder: Pairs(folder / "pairs.jsonl", keys=("a", "b"), batch=2, held_out=0)),
    "metrics": Target(_metrics, lambda folder: list(journal.read(folder / "metrics.jsonl"))),
    "lock": Target(_lock, job_in),
    "jsonl": Target(_texts, partial(_read_texts, name="in.jsonl")),
    "parquet": Target(_parquet, partial(_read_texts, name="in.parquet")),
    "dcp": Target(_dcp, _read_dcp),
    "dcp piece": Target(_other(_dcp, "dcp/__0_0.distcp"), _read_dcp),
}


# -- changes ---------------------------------------------------------------------------------------------------------


def mutated(path: Path, draw: random.Random) -> str:
    """Change a file; what was done, in words."""
    kinds = [_structure] * 6 + [_bytes] * 3 + [_replaced]
    return draw.choice(kinds)(path, draw)


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, part in inside for found in _places(part, (*place, key)))]


def _get(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def _parsed(path: Path) -> tuple[Any, bytes]:
    """The value in a file, and the bytes that follow it."""
    raw = path.read_bytes()
    if path.suffix == ".safetensors":
        size = int.from_bytes(raw[:8], "little")
        return json.loads(raw[8 : 8 + size]), raw[8 + size :]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in raw.splitlines()], b""
    return (yaml.safe_load(raw) if path.suffix == ".yaml" else json.loads(raw)), b""


def _spelled(path: Path, value: Any, rest: bytes) -> bytes:
    if path.suffix == ".yaml":
        return yaml.dump(value).encode("utf-8", "surrogatepass")
    if path.suffix == ".jsonl":
        return b"".join(json.dumps(line).encode() + b"\n" for line in value)
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text + rest if path.suffix == ".safetensors" else text


def _structure(path: Path, draw: random.Random) -> str:
    try:
        _parsed(path)
    except ValueError:
        return _bytes(path, draw)
    return structure(path, draw)[0] or _bytes(path, draw)


def structure(path: Path, draw: random.Random) -> tuple[str, tuple[Any, ...]]:
    """A part of the JSON or YAML in the file is replaced, dropped, renamed or swapped: (what was done, where)."""
    value, rest = _parsed(path)
    places = [place for place in _places(value) if place]
    if not places:
        return "", ()
    place = draw.choice(places)
    home, key = _get(value, place[:-1]), place[-1]
    what = draw.choice(("replace", "replace", "replace", "drop", "rename", "swap", "add", "number", "deep"))
    if what == "drop":
        del home[key]
    elif what == "rename" and isinstance(home, dict):
        home[draw.choice(["", "x", str(key) + "x", "\0"])] = home.pop(key)
    elif what == "swap":
        home[key] = copy.deepcopy(_get(value, draw.choice(places)))
    elif what == "add" and isinstance(home, dict):
        home[draw.choice(["x", "__metadata__", "version"])] = draw.choice(NASTY)
    elif what == "number" and type(home[key]) in (int, float):
        home[key] = draw.choice([home[key] + 1, home[key] - 1, -home[key], home[key] * 2, str(home[key])])
    elif what == "deep":
        for _ in range(40 if path.suffix == ".yaml" else draw.choice((40, 400))):
            home[key] = [home[key]]
    else:
        home[key] = draw.choice(NASTY)
    path.write_bytes(_spelled(path, value, rest))
    return f"{what} {place}", place


def _bytes(path: Path, draw: random.Random) -> str:
    raw = bytearray(path.read_bytes())
    at, other = draw.randrange(len(raw) + 1), draw.randrange(len(raw) + 1)
    a, b = min(at, other), max(at, other)
    what = draw.choice(("cut", "flip", "flip", "drop", "insert", "repeat", "zeros", "empty"))
    if what == "cut":
        del raw[at:]
    elif what == "flip" and raw:
        for _ in range(draw.choice((1, 1, 8))):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif what == "drop":
        del raw[a:b]
    elif what == "insert":
        raw[at:at] = draw.choice([draw.randbytes(9), b"9" * 5000, b"[" * 4000, b"\xff\xfe", b"&a [*a]", b'"', b"\0"])
    elif what == "repeat":
        raw[at:at] = raw[a:b]
    elif what == "zeros":
        raw[a:b] = bytes(b - a)
    else:
        raw.clear()
    path.write_bytes(raw)
    return f"{what} {a} {b}"


def _replaced(path: Path, draw: random.Random) -> str:
    what = draw.choice(("FIFO", "folder", "link", "loop", "pointer", "gone", "device", "nested"))
    path.unlink()
    if what == "FIFO":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(path.parent / "victim")
        (path.parent / "victim").write_text("{}")
    elif what == "loop":
        path.symlink_to(path)
    elif what == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "nested":
        path.write_text("[" * 100_000)
    return what


# -- running ---------------------------------------------------------------------------------------------------------


class Late(BaseException):
    """A reader did not return within LIMIT."""


def _late(*_: object) -> None:
    raise Late(f"no answer within {LIMIT} s")


def state_of(folder: Path) -> list[tuple[object, ...]]:
    """Every name below a folder, with what changes when somebody writes."""
    found: list[tuple[object, ...]] = []
    for home, folders, files in os.walk(folder):
        for name in (*folders, *files):
            about = os.lstat(os.path.join(home, name))
            found.append((home, name, about.st_mode, about.st_ino, about.st_size, about.st_mtime_ns))
    return sorted(found, key=str)


class Fuzzer:
    """Makes each target's folder once, and puts its files back after each mutation."""

    def __init__(self, home: Path, only: Iterable[str] | None = None) -> None:
        self.home = home
        self.names: dict[str, str] = {}
        for target in only or TARGETS:
            (home / target).mkdir()
            self.names[target] = TARGETS[target].make(home / target)

    def once(self, seed: int, only: str | None = None) -> tuple[str, BaseException | None]:
        """(target and change, what was raised that is no IsogradError)."""
        draw = random.Random(seed)
        target = only or draw.choice(list(TARGETS))
        place = self.home / target
        file = place / self.names[target]
        whole = file.read_bytes()
        try:
            done = mutated(file, draw)
            TARGETS[target].repair(place)
            return f"{target}: {done}", self._raised(TARGETS[target], place)
        finally:
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                file.unlink(missing_ok=True)
            (file.parent / "victim").unlink(missing_ok=True)
            file.write_bytes(whole)
            TARGETS[target].repair(place)

    def _raised(self, target: Target, place: Path) -> BaseException | None:
        before = state_of(place)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            target.read(place)
        except IsogradError as error:
            if not 2 <= len(str(error).splitlines()) <= 40 or len(str(error)) > 8000:
                return AssertionError(f"an error of {len(str(error))} characters: {str(error)[:300]}")
        except BaseException as error:
            return error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return None if state_of(place) == before else AssertionError("a file was written")


def run(seeds: range, say: Callable[[str], None] = print) -> int:
    """How many seeds end in anything but a value or an IsogradError; each is reported, and so is progress."""
    signal.signal(signal.SIGALRM, _late)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        fuzzer = Fuzzer(Path(home))
        for seed in seeds:
            what, raised = fuzzer.once(seed)
            if raised is not None:
                wrong += 1
                say(f"seed {seed}: {what}\n{''.join(traceback.format_exception(raised)[-3:])}")
            if (seed - seeds.start + 1) % 10_000 == 0:
                say(f"{seed - seeds.start + 1:,} of {len(seeds):,} mutations, {wrong} wrong")
    return wrong


def run_for(target: str, seconds: float, seed: int = 0) -> list[str]:
    """Mutations of one target, one after the other, for so long: what ended in anything but a value or an
    IsogradError."""
    signal.signal(signal.SIGALRM, _late)
    wrong, until = list[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        fuzzer = Fuzzer(Path(home), [target])
        while time.monotonic() < until:
            what, raised = fuzzer.once(seed, target)
            if raised is not None:
                wrong.append(f"seed {seed}: {what}\n{''.join(traceback.format_exception(raised)[-3:])}")
            seed += 1
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    found = run(range(options.seed, options.seed + options.count))
    print(f"{options.count} mutations, {found} of them wrong, {time.monotonic() - began:.0f} s")
    sys.exit(bool(found))
