"""`isograd config from FILE`: the config of another program as a run's config, with the fate of every key.

A key is *taken*, and the field that it sets is named; *meaningless*, because it tunes what isograd does otherwise with
the same gradients; *open*, when only the user can say it; or *refused*, because leaving it out would train otherwise.
When one is refused nothing is written. Nothing of a file is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from isograd.errors import IntegrationError
from isograd.integrations import accelerate_config, megatron_config, trainer_config
from isograd.integrations.deepspeed import config as deepspeed_config
from isograd.integrations.deepspeed.keys import KeyOutcome
from isograd.io import yaml_reader
from isograd.io.atomic import write_new
from isograd.io.untrusted import CONFIG, read_json, read_text

HEAD = """# Written from {source} by 'isograd config from'. Set what is named 'open' in the table that it printed.
# AdamW decays matrices only here: norms and biases have no weight decay.
"""
Convert = Callable[[Any, "int | None"], tuple[dict[str, Any], list[KeyOutcome]]]
KINDS: dict[str, Convert] = {
    "deepspeed": deepspeed_config.convert,
    "trainer": trainer_config.convert,
    "megatron": megatron_config.convert,
    "neox": partial(megatron_config.convert, neox=True),
    "accelerate": accelerate_config.convert,
}
# One of these is enough to know whose file it is; the first kind that has one.
TELLING = {
    "accelerate": ("distributed_type", "compute_environment"),
    "neox": ("num_layers", "num-layers", "pipe_parallel_size", "pipe-parallel-size"),
    "trainer": ("base_model", "model_name_or_path"),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "optimizer"),
}


def main(words: list[str], kind: type[argparse.ArgumentParser], check: Callable[[dict[str, Any], str], object]) -> int:
    """`isograd config from`; the exit code. check: refuses what is no config of a run."""
    parser = kind(
        prog="isograd config from",
        description="Write a run's config from that of another program, and say of every key what became of it.",
    )  # fmt: skip
    parser.add_argument("source", help="JSON, YAML, or arguments in a shell script")
    parser.add_argument("file", nargs="?", default="run.yaml", help="where to write it (default: run.yaml)")
    parser.add_argument("--ranks", type=_ranks, metavar="N", help="that the run has (default: as the file says)")
    parser.add_argument("--kind", choices=tuple(KINDS), help="whose file it is (default: as its keys say)")
    options = parser.parse_args(words)
    values, found = read(options.source, options.kind)
    config, rows = KINDS[found](values, options.ranks)
    print(table(rows))
    refused = [row for row in rows if row.fate == "refused"]
    if refused:
        raise IntegrationError(
            "IG865",
            f"{len(refused)} of {len(rows)} keys would train otherwise here than there; nothing was written",
            seen="; ".join(f"{row.key} {row.why}" for row in refused[:8]),
            fix="change or remove them in the file",
        )
    check(config, options.source)  # such as a warmup that is longer than the run
    text = HEAD.format(source=Path(options.source).name) + yaml.safe_dump(config, sort_keys=False)
    file = write_new(Path(options.file), text, f"isograd config from {options.source} ANOTHER-NAME.yaml")
    print(f"\n{file} written, from a file of {found}. Set what is open; then: isograd train {file} --dry-run")
    return 0


def read(source: str, kind: str | None) -> tuple[object, str]:
    """What a file says, and whose it is."""
    if source.endswith(".json"):
        values = read_json(source, CONFIG, follow=True)
    else:
        text = read_text(source, CONFIG, follow=True)
        if kind == "megatron" or (kind is None and not source.endswith((".yaml", ".yml")) and "--" in text):
            return megatron_config.arguments_of(text), "megatron"
        try:
            values = yaml_reader.parse(text)
        except yaml_reader.ERRORS as error:
            seen = yaml_reader.read_error(source, error)
            raise IntegrationError("IG863", "no file of YAML", seen=seen, fix="change that line") from error
    if not isinstance(values, dict) or not values:
        raise IntegrationError(
            "IG863",
            f"{source} is no config of another program",
            seen=f"{repr(values)[:60]}",
            expected="keys, each with its value",
            fix="give the file that the other program reads",
        )
    known = (name for name, telling in TELLING.items() if any(key in values for key in telling))
    return {str(key): value for key, value in values.items()}, kind or next(known, "trainer")


def table(rows: list[KeyOutcome]) -> str:
    """A line for each key: its fate, its name, its value and where it went, or why not."""
    order = ("refused", "open", "taken", "meaningless")
    wide = max((len(row.key) for row in rows), default=0)
    lines = []
    for row in sorted(rows, key=lambda row: order.index(row.fate)):
        shown = repr(row.value) if len(repr(row.value)) <= 24 else f"{repr(row.value)[:21]}..."
        arrow = "->" if row.fate == "taken" else "  "
        lines.append(f"{row.fate:<12}{row.key:<{wide}}  {shown:<24} {arrow} {row.why}")
    return "\n".join(lines)


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)
