"""Train a small byte-level model on Python's own source text with 4 local ranks, then prove the layout.

    python examples/quickstart.py                       # dp2 tp2 sp zero1
    python examples/quickstart.py --layout "dp4 zero2"
    python examples/quickstart.py --steps 0 --forget norm1    # plant a bug: these gradients are not summed over tp

The proof is isograd.verify: in fp64 and on uneven data it compares every gradient of this layout with one device's,
before clipping and optimizer, by name and block. With --forget it shows that it can fail, and what it says then.
"""

from __future__ import annotations

import argparse
import dataclasses
import sysconfig
import time
from functools import partial
from pathlib import Path

import torch

import isograd as ig
from isograd_verify.tell.report import picture

BATCH, LENGTH = 16, 128  # sequences per step over all data ranks, bytes per sequence
STEPS = 60


def corpus() -> torch.Tensor:
    """Bytes of the standard library's own modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, labels, sample ids) of some rows of a step's global batch: a function of the step alone."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    window = torch.stack([text[s : s + LENGTH + 1] for s in starts[rows.start : rows.stop].tolist()]).long()
    return window[:, :-1], window[:, 1:].clone(), torch.arange(rows.start, rows.stop) + step * BATCH


def my_rows(mesh: ig.Mesh) -> range:
    share = BATCH // mesh.size("dp")
    return range(mesh.index("dp") * share, (mesh.index("dp") + 1) * share)


def train(layout: str, steps: int) -> None:
    """The main job: the loop that a user writes."""
    mesh = ig.Mesh(layout)
    config = ig.models.preset("quickstart")
    model = ig.models.Transformer(config, mesh)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=2e-3, fused=True), clip=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, steps, eta_min=2e-4)
    text, began = corpus(), time.perf_counter()
    for step in range(steps):
        tokens, labels, samples = batch(text, step, my_rows(mesh))
        loss, count = model(tokens, labels, key=ig.rng.key(0, step), samples=samples)
        engine.backward(loss, weight=count)
        stats = engine.step()
        schedule.step()
        if mesh.rank == 0 and (step % 5 == 4 or step == 0):
            passed = time.perf_counter() - began
            left = passed / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1:3d}/{steps}  loss {stats.loss:.4f}  grad norm {stats.grad_norm:.3f}  "
                f"lr {schedule.get_last_lr()[0]:.2e}  {stats.weight * (step + 1) / passed:,.0f} tokens/s  "
                f"ETA {left:.0f} s",
                flush=True,
            )


def case(forget: str, mesh: ig.Mesh) -> ig.prove.Case:
    """What is proven: a smaller copy of the model on sequences with different numbers of labels."""
    config = dataclasses.replace(ig.models.preset("quickstart"), layers=2)
    model = ig.models.Transformer(config, mesh)
    for record in ig.contracts(model, mesh):
        if forget and forget in record.name:  # what a sequence-parallel trainer does that never sums these over tp
            ig.declare(
                record.parameter, mesh, shape=record.contract.shape, shards=record.contract.shards, partial_over=()
            )
    tokens, labels, samples = batch(corpus(), 0, range(BATCH))
    for row in range(BATCH):
        labels[row, : 7 * row] = -100  # uneven: later rows, and so later ranks, have fewer labels
    return ig.prove.Case(model, {"tokens": tokens.clone(), "labels": labels, "samples": samples}, loss)


def loss(model: torch.nn.Module, part: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(part["tokens"], part["labels"], key=ig.rng.key(0), samples=part["samples"])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layout", default="dp2 tp2 sp zero1")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--forget", default="", metavar="NAME", help="plant a bug: drop the debts of these parameters")
    parser.add_argument("--svg", metavar="FILE", help="write the proof as a picture")
    options = parser.parse_args()
    layout = ig.Layout.parse(options.layout)
    if options.steps:
        print(f"training on {layout.world_size} local ranks under '{layout}'", flush=True)
        ig.launch(train, layout.world_size, str(layout), options.steps)
        print("training done; now the proof of its layout", flush=True)
    report = ig.verify(partial(case, options.forget), [str(layout)])
    print(report)
    if options.svg:
        Path(options.svg).write_text(picture(report, 110))
    raise SystemExit(report.exit_code)


if __name__ == "__main__":
    main()
