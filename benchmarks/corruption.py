"""What the checks for silent corruption cost: CPU seconds of a rank in a step, with and without, in turn.

python -m benchmarks.corruption --ranks 2 --rounds 5

What a rank keeps is looked at in two calls of milliseconds, which are timed by themselves: steps differ by more.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import torch

import isograd as ig
from isograd.engine import MemoryChecksum, ReplayCheck
from isograd.engine.batches import micro_batches
from isograd.models import Transformer, TransformerConfig

ROWS, LENGTH, MICROS = 8, 256, 4
WAYS = ("plain", "weights", "state", "sums", "replay")


def rank(rounds: int) -> dict[str, list[float]]:
    """Of each way, the CPU seconds of one step in each round."""
    _, size = ig.comm.world.world()
    mesh = ig.Mesh(f"dp{size} zero1")
    config = TransformerConfig(vocab=2048, hidden=256, layers=4, heads=8, mlp=688)
    model = Transformer(config, mesh)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3), clip=1.0)
    replay = ReplayCheck(engine)
    seals = {"weights": partial(MemoryChecksum, engine, optimizer=False), "state": partial(MemoryChecksum, engine)}
    tokens = torch.randint(2048, (ROWS, LENGTH), generator=torch.Generator().manual_seed(mesh.rank))
    batch = (tokens, tokens.roll(-1, 1))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 1):
        for way in WAYS:
            began, alone = time.process_time(), 0.0
            if way in seals:
                seal = seals[way]()  # after the step before
                alone = time.process_time() - began
            if way == "sums":
                engine.check_sums()
            if way == "replay":
                replay.begin()
            engine.accumulate(batch, MICROS)
            if way in seals:
                start = time.process_time()
                seal.check()
                alone += time.process_time() - start
            if way == "replay":
                replay.compare(micro_batches(batch, MICROS)[0])
            engine.step()
            if round_:
                found[way].append(alone if way in seals else time.process_time() - began)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = ig.launch(rank, options.ranks, options.rounds)[0]
    plain = median(found["plain"])
    for way in WAYS:
        base = 0.0 if way in ("weights", "state") else 1.0
        extra = median(a / b for a, b in zip(found[way], found["plain"], strict=True)) - base
        print(f"{way:8} {median(found[way]):.4f} s of CPU a step, {extra:+.2%} of {plain:.3f} s")


if __name__ == "__main__":
    main()
