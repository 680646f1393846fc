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
from isograd.train.journal import human
from isograd.train.loop import Orders, Outcome, run

MOST = 2e9  # parameters of a model that a step is taken with on CPUs


def dry_run(config: Config) -> int:
    layout = Layout.parse(config.layout)
    print(f"config: fits its schema; {config.steps} steps of {config.batch} x {config.data.length} tokens")
    described = language.model_config(config.model)
    for rank in range(layout.world_size):
        model = Transformer(described, Mesh.unbound(layout, rank), device="meta")
    count = language.parameters(described) + (0 if described.tied else described.vocab * described.hidden)
    held = sum(record.parameter.numel() for record in contracts(model, Mesh.unbound(layout, layout.world_size - 1)))
    print(
        f"model: {human(count)} parameters; each of {layout.world_size} ranks builds its part (the last: {human(held)})"
    )
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
        language.prepare(one)
        mixture = language.mixture(one, "train")
        print(f"data: {mixture.describe()}")
        if count > MOST and not torch.cuda.is_available():
            print("step: not taken, the model is too large for CPUs")
        else:
            with World(layout.world_size, threads=config.threads) as world:
                outcome: Outcome = world.run(run, one, Orders(resume="never", show="lines", signals=()))[0]
            print(f"step: taken, loss {outcome.losses[0]:.4f}, saved, evaluated")
            if outcome.code:
                print(f"step: {outcome.why}")
                return outcome.code
    print("dry run passed; nothing was kept")
    return 0
