"""A run without a run: what would be started, whether it fits, one real step in a folder that is thrown away."""

from __future__ import annotations

import tempfile

import torch

from isograd.comm.launch import World
from isograd.contract import contracts
from isograd.layout import Layout
from isograd.mesh import Mesh
from isograd.models import Transformer
from isograd.train import language
from isograd.train.config import Config
from isograd.train.job import prepare
from isograd.train.journal import human
from isograd.train.loop import Orders, Outcome, run

MOST = 2e9  # parameters of a language model that a step is taken with on CPUs


def dry_run(config: Config) -> int:
    unit = f"sequences of {config.data.length} tokens" if config.data else "pairs"
    print(f"config: fits its schema; {config.steps} steps of {config.batch} {unit}")
    size = _parts(config) if config.data else 0
    with tempfile.TemporaryDirectory(prefix="isograd-dry-") as folder:
        one = config.model_copy(
            update={
                "run": folder,
                "steps": 1,
                "optimizer": config.optimizer.model_copy(update={"warmup": 0}),
                "log": config.log.model_copy(update={"sample": 0, "tensorboard": False, "trackio": None}),
                "evaluate": config.evaluate.model_copy(update={"batches": 1}),
            }
        )
        prepare(one)
        mixture = language.mixture(one, "train") if config.data else None
        if mixture is not None:
            print(f"data: {mixture.describe()}")
        if size > MOST and not torch.cuda.is_available():
            print("step: not taken, the model is too large for CPUs")
        else:
            with World(Layout.parse(config.layout).world_size, threads=config.threads) as world:
                outcome: Outcome = world.run(run, one, Orders(resume="never", show="lines", signals=()))[0]
            if outcome.code:
                print(f"step: {outcome.why}")
                return outcome.code
            print(f"step: taken, loss {outcome.losses[0]:.4f}, saved, evaluated")
    print("dry run passed; nothing was kept")
    return 0


def _parts(config: Config) -> int:
    """Build every rank's part of a language model without memory, which shows whether the layout fits it."""
    layout, described = Layout.parse(config.layout), language.model_config(config.model)
    for rank in range(layout.world_size):
        mesh = Mesh.unbound(layout, rank)
        held = sum(r.parameter.numel() for r in contracts(Transformer(described, mesh, device="meta"), mesh))
    count = language.parameters(described) + (0 if described.tied else described.vocab * described.hidden)
    print(
        f"model: {human(count)} parameters; each of {layout.world_size} ranks builds its part (the last: {human(held)})"
    )
    return count
