"""What surviving deaths costs a step in which nobody dies: resilience off, with copies, and without, in turn.

    python -m benchmarks.resilience_cost                        2 and 4 ranks, 8 x 256 and 2 x 256 tokens over all ranks
    python -m benchmarks.resilience_cost --ranks 2 --rows 8 --rounds 9

    off          accumulate and step
    none         resilience.copies none
    partner      resilience.copies partner: all ranks on one machine
    elsewhere    the same with every rank on a machine of its own (imitated: the rows go over loopback)

One engine takes all steps, ways in another order in each round, so that a machine that becomes slower does so for all
of them. Ratios are medians over rounds of a way's step to the same round's step without resilience.
"""

from __future__ import annotations

import argparse
import socket
import time
from statistics import median
from typing import Any

import torch

import isograd as ig
from benchmarks.quiet import refuse_noise
from benchmarks.task import Sizes, batch
from isograd.elastic import Copies
from isograd.models import Transformer, TransformerConfig

WAYS = ("off", "none", "partner", "elsewhere")


def rank(layout: str, rows: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Of each way: (seconds, CPU seconds) of a step in each round."""
    mesh = ig.Mesh(layout)
    sizes = Sizes(batch=rows)
    config = TransformerConfig(
        vocab=sizes.vocab, hidden=sizes.hidden, layers=sizes.layers, heads=sizes.heads, mlp=sizes.mlp
    )
    engine = ig.Engine(Transformer(config, mesh), mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True), clip=1.0)
    mine = batch(sizes, 0).share(mesh.index("dp"), mesh.size("dp"))
    given = mine.tokens, mine.labels
    engine.train_step(given)
    ways: dict[str, Copies | None] = {
        "off": None,
        "none": _copies(engine, "none"),
        "partner": _copies(engine, "partner"),
    }
    real, socket.gethostname = socket.gethostname, lambda: f"host{mesh.rank}"
    ways["elsewhere"] = _copies(engine, "elsewhere")
    socket.gethostname = real
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for turn in range(len(WAYS)):
            way = WAYS[(turn + number) % len(WAYS)]
            copies = ways[way]
            for again in range(2):  # the second step is measured: it begins with the copies of the first under way
                began = time.perf_counter(), time.process_time()
                engine.accumulate(given)
                if copies is not None:
                    copies.finish()
                engine.step()
                if copies is not None:
                    copies.start(2 * number + again)
                if number and again:
                    found[way].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            if copies is not None:
                copies.finish()
    return found


def _copies(engine: ig.Engine, way: str) -> Copies:
    made = Copies(engine, way, {}, partner=way != "none")
    made.start(0)
    made.finish()
    return made


def report(found: list[dict[str, list[tuple[float, float]]]]) -> list[str]:
    """A line for each way: the slowest rank of each round counts; CPU seconds of all ranks."""
    wall = {
        way: [max(times) for times in zip(*([s for s, _ in one[way]] for one in found), strict=True)] for way in WAYS
    }
    work = {
        way: [sum(times) for times in zip(*([c for _, c in one[way]] for one in found), strict=True)] for way in WAYS
    }
    lines = []
    for way in WAYS:
        slower = _over(wall[way], wall["off"])
        more = _over(work[way], work["off"])
        lines.append(f"  {way:10} {1000 * median(wall[way]):8.0f} ms a step  {slower:+7.2%}   work {more:+7.2%}")
    return lines


def _over(mine: list[float], others: list[float]) -> float:
    return median(a / b for a, b in zip(mine, others, strict=True)) - 1


def main(given: list[str] | None = None) -> None:
    """Print a table for each number of ranks and each size of a batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 2], help="of 256 tokens, over all ranks")
    parser.add_argument("--layout", help="default: dpN zero1; where the rows are fewer than N, dp2 tp(N/2) sp zero1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--anyway", action="store_true", help="also on a busy machine")
    options: Any = parser.parse_args(given)
    if not options.anyway:
        refuse_noise()
    for ranks in options.ranks:
        for rows in options.rows:
            layout = options.layout or (f"dp{ranks} zero1" if rows >= ranks else f"dp2 tp{ranks // 2} sp zero1")
            found = ig.launch(rank, ranks, layout, rows, options.rounds)
            print(f"{layout}, {rows} x 256 tokens, {options.rounds} rounds", *report(found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
