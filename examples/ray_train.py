"""An isograd loop in Ray Train's TorchTrainer: Ray places the ranks and starts them anew when one has died.

    python examples/ray_train.py --layout "dp2 zero1" --folder /shared/run

Ray's process group is isograd's world. When a worker dies, Ray starts the group anew (`FailureConfig`), and the loop
goes on from its newest checkpoint, which any layout can read: the new group may have another size.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import isograd as ig

ROWS = 8  # of each step's batch, over all ranks


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows of a step: a function of the step alone, so that a new start goes on where the old one ended."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 16, generator=generator, dtype=torch.float64)
    return x[rank::ranks], x.cumsum(1)[rank::ranks]


def train(options: dict[str, Any]) -> None:
    """On every worker."""
    mesh = ig.Mesh(options["layout"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).double()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-2))
    with ig.checkpoint.CheckpointManager(options["folder"], engine) as checkpoints:
        newest = checkpoints.load()
        for step in range(newest.step if newest else 0, options["steps"]):
            x, y = batch(step, mesh.index("dp"), mesh.size("dp"))
            engine.backward((model(x) - y).square().mean(), weight=len(x))
            stats = engine.step()
            if (step + 1) % options["every"] == 0:
                checkpoints.save(step + 1)
                ray.train.report({"step": step + 1, "loss": float(stats.loss)})  # waits for Ray, up to two seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="dp2 zero1")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints, and reports")
    parser.add_argument("--folder", required=True, help="of checkpoints: one that all machines share")
    options = vars(parser.parse_args())
    ranks = ig.Layout.parse(options["layout"]).world_size
    trainer = TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=f"{options['folder']}/ray", failure_config=FailureConfig(max_failures=3)),
    )
    print("last:", trainer.fit().metrics)


if __name__ == "__main__":
    main()
