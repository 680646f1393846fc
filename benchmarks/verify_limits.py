"""How near right programs come to the verifier's limits: the measurement that isograd_verify/tolerances.py names.

    python -m benchmarks.verify_limits [--seeds 10]

Two ranks train a small model on uneven labels in three micro-batches and sum their gradients, in fp64, fp32 and bf16,
with weights and data drawn anew from every seed; a rank reports the norm that it computed by itself. All is right, so
every number is rounding: the largest of each kind, beside the limit that it must not reach.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from isograd.launcher.launch import World
from isograd_verify import tolerances
from isograd_verify.corpus.plain import Mlp, cross_entropy, micro_batches, valid
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import Norm
from isograd_verify.record.recording import Recording
from isograd_verify.tell.wording import spread
from isograd_verify.watch.capture import Capture

MICROS = 3


def train(seed: int, dtype: str, directory: str) -> None:
    """One step of one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = Mlp().to(getattr(torch, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = list(micro_batches(rank, world, seed, MICROS))
    total = torch.stack([valid(labels) for _, labels in parts]).sum()
    dist.all_reduce(total)
    with Capture(directory, steps=1):
        for tokens, labels in parts:
            (cross_entropy(model(tokens), labels) / total).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        parameters = list(model.parameters())
        torch.nn.utils.clip_grad_norm_(parameters if rank else parameters[::-1], 0.1)  # added in another order
        optimizer.step()


def measure(recording: Recording) -> dict[str, float]:
    """The largest of each kind in one recording."""
    analysis = Analysis(recording, 1)
    found: dict[str, float] = defaultdict(float)
    for name in analysis.names:
        if analysis.null(name):
            continue
        for seen in analysis.observed(name):
            fit = analysis.fit(seen)
            if fit is None or len(analysis.contributions(name)) < 2:
                continue
            found["residual / FIT"] = max(found["residual / FIT"], fit.residual / analysis.tolerance(name))
            matrix = torch.stack([analysis.parts[name][key] for key in fit.coefficients], 1)
            wanted = torch.linalg.lstsq(matrix, seen.sketch[:, None], driver="gelsd").solution[:, 0]
            loose = spread(wanted.tolist()) / (tolerances.LOOSE * analysis.tolerance(name))
            found["spread of coefficients / LOOSE x FIT"] = max(found["spread of coefficients / LOOSE x FIT"], loose)
    norms = [event.value for record in recording.ranks for event in record.of(Norm)]
    found["spread of norms / NORM"] = spread(norms) / tolerances.NORM
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    world = World(2)
    print(f"right programs, {seeds} seeds: the largest share of each limit (1 would be told)\n")
    try:
        for dtype in ("float64", "float32", "bfloat16"):
            worst: dict[str, float] = defaultdict(float)
            for seed in range(seeds):
                with tempfile.TemporaryDirectory() as place:
                    home = Path(place) / "it"
                    world.run(partial(train, seed, dtype, str(home)))
                    for kind, share in measure(Recording(home)).items():
                        worst[kind] = max(worst[kind], share)
            print(f"| {dtype} | " + " | ".join(f"{kind}: {share:.2g}" for kind, share in worst.items()) + " |")
    finally:
        world.close()


if __name__ == "__main__":
    main()
