"""`isograd rehearse CONFIG`: one step of a run's program on simulated ranks, before anybody spends a cluster on it.

Nothing is read but the config: tokens are zeros, and values have no memory. See docs/rehearse.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from isograd.cli.subcommands import CommandParser, in_bytes, number
from isograd.core.layout import Layout
from isograd.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isograd.comm.record import Entry
    from isograd.core.mesh import Mesh
    from isograd.engine import Engine
    from isograd.plan.rehearse import Build, RehearsedRank
    from isograd.train.config import Config

SHOWN = 12  # findings
MOST = 10_000  # micro-batches: more would take days
PATIENCE = 15.0  # seconds between two words about how far it is


def rehearse(words: list[str]) -> int:
    """`isograd rehearse`: run the program of each kind of rank, and check what they send; the exit code."""
    parser = CommandParser(
        prog="isograd rehearse",
        description="Run one step of a run's program on simulated ranks, without their memory, and check that every "
        "message has its other end, that no ranks wait in a circle, and that every gradient is summed once over its "
        "ranks.",
    )  # fmt: skip
    parser.add_argument("config", help="a config of 'isograd train'")
    parser.add_argument("--layout", help="in place of the config's, for example 'dp128 tp8 sp pp16 zero1'")
    parser.add_argument(
        "--micro-batches",
        type=number(1, MOST),
        metavar="N",
        help="a shorter step: so many micro-batches of the config's size",
    )
    options = parser.parse_args(words)
    config, layout = _read(options)
    from isograd.plan.check import check
    from isograd.plan.rehearse import rehearse as run
    from isograd.train.language import model_config

    began = said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > PATIENCE:
            said = time.monotonic()
            print(f"{done} of {total} ranks, {said - began:.0f} s", file=sys.stderr)

    build = _build(config, layout, options.micro_batches or config.micro_batches)
    ranks = run(build, layout, tell=tell)
    print(table(ranks, layout))
    if model_config(config).experts is not None:
        print("\nexperts: how often they are chosen is not known before the run. Stated: even")
    findings = check(ranks, layout)
    took = f"{time.monotonic() - began:.0f} s"
    if not findings:
        print(f"\nall messages match: {len(ranks)} of {layout.world_size} ranks were simulated, in {took}")
        return 0
    lines = [f"{finding.kind}: {finding.what}" for finding in findings[:SHOWN]]
    more = len(findings) - SHOWN
    raise PlanError("IG271", seen="\n            ".join(lines + ([f"and {more} more"] if more > 0 else [])))


def _read(options: argparse.Namespace) -> tuple[Config, Layout]:
    from isograd.cli.plan import MOST_LAYERS
    from isograd.train.language import model_config
    from isograd.train.reading import load

    if options.layout is not None and not options.layout.strip():
        raise ConfigError("IG600", "--layout is empty", seen=repr(options.layout), fix="leave it out")
    dotted = []
    if options.layout:  # a batch that does not divide is the config's mistake, not this layout's
        dotted = ["--layout", options.layout, *_batch(options.config, Layout.parse(options.layout))]
    config = load(options.config, dotted).config
    if config.data is None:
        raise PlanError(
            "IG270", "pairs cannot be rehearsed", seen="`pairs` in the config", expected="a language model: `data`"
        )
    if (layers := model_config(config).layers) > MOST_LAYERS:
        raise PlanError(
            "IG270", "the model has too many layers to rehearse", seen=f"{layers:,} layers",
            expected=f"at most {MOST_LAYERS:,}",
        )  # fmt: skip
    return config, Layout.parse(config.layout)


def _batch(path: str, layout: Layout) -> list[str]:
    """--batch, where the config's batch is too small for this many data ranks: one sequence for each micro-batch."""
    from isograd.train.reading import load

    config = load(path).config
    rows, rest = divmod(config.batch, layout.dp)
    if not rest and rows >= config.micro_batches:
        return []
    batch = layout.dp * config.micro_batches
    print(f"batch {config.batch} does not fit {str(layout)!r}: rehearsed with batch {batch}", file=sys.stderr)
    return ["--batch", str(batch)]


def _build(config: Config, layout: Layout, micro_batches: int) -> Build:
    import torch

    from isograd.core import rng
    from isograd.models import Transformer
    from isograd.plan.rehearse import without_memory
    from isograd.train.language import model_config
    from isograd.train.task import DTYPES, engine_of

    assert config.data is not None
    described, length, rows = model_config(config), config.data.length, config.batch // layout.dp
    if micro_batches != config.micro_batches:
        rows = micro_batches * -(-rows // config.micro_batches)

    def build(mesh: Mesh) -> tuple[Engine, Any, int]:
        model = Transformer(described, mesh, dtype=DTYPES[config.model.dtype], device="meta")
        model.recompute = config.model.recompute
        engine = engine_of(config, without_memory(model, later=layout.zero == 3), mesh)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": tokens, "samples": torch.arange(rows), "key": rng.key(0, "dropout", 0)}
        return engine, batch, micro_batches

    return build


def table(ranks: list[RehearsedRank], layout: Layout) -> str:
    """Per kind of rank: messages, bytes by axes, and what a rank holds."""
    from isograd.plan.allocations import FLIGHTS, GRADIENTS
    from isograd.plan.rehearse import kinds

    lines = [f"{layout!s}: {layout.world_size} ranks"]
    for which, kind in enumerate(kinds(ranks), 1):
        one = max(kind, key=lambda rank: sum(entry.bytes for entry in rank.step))
        first = max(kind, key=lambda rank: sum(entry.bytes for entry in rank.entries[: rank.start]))
        most, left = one.peak.most, one.peak.left[GRADIENTS]
        lines += [
            f"\nkind {which}: {kind[0].where}" + (f" and {len(kind) - 1} more" if len(kind) > 1 else ""),
            f"  holds     between steps: parameters {in_bytes(one.parameters)}, gradients {in_bytes(left)}, "
            f"states {in_bytes(one.states)}",
            f"            in a step at most: gradients {in_bytes(most[GRADIENTS])}, "
            f"on their way {in_bytes(most[FLIGHTS])}",
            f"  sends     in a step: {_sent(one.step)}",
            f"            once, at the start: {_sent(first.entries[: first.start])} ({first.where})",
            *_peak(max(kind, key=lambda rank: rank.peak.bytes)),
        ]
    return "\n".join(lines)


def _sent(entries: Sequence[Entry]) -> str:
    """How many messages, and their bytes by axes."""
    sent: dict[str, int] = {}
    for entry in entries:
        sent[entry.axes] = sent.get(entry.axes, 0) + entry.bytes
    messages = sum(len(pieces) for entry in entries for pieces in entry.sent)
    moved = ", ".join(f"{axes} {in_bytes(count)}" for axes, count in sorted(sent.items()) if count)
    return f"{messages} messages" + (f": {moved}" if moved else "")


def _peak(rank: RehearsedRank) -> list[str]:
    """The peak of a rank's memory, what is held there, and whose it is."""
    peak = rank.peak
    parts = ", ".join(f"{kind} {in_bytes(count)}" for kind, count in peak.kinds.items() if count * 1000 > peak.bytes)
    owners = [f"            {in_bytes(count):>8}  {owner}" for owner, count in peak.owners]
    return [f"  peak      {in_bytes(peak.bytes)} in {peak.when} ({rank.where}): {parts}", *owners]
