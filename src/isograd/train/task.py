"""What the loop asks of a task. language.py trains on tokens, preference.py on pairs of answers, pairs.py
on texts that belong together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from isograd.comm.consensus import all_gather_object, run_or_raise_on_all_ranks
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.engine import Engine, WeightAverage
from isograd.errors import DataError
from isograd.io.safetensors_reader import Weights
from isograd.train.config import Config
from isograd.train.optimizers import ELEMENTWISE, MATRICES, factory


@dataclass(frozen=True)
class Evaluated:
    """On what was held out; equal on all ranks."""

    loss: float
    weight: float
    more: dict[str, float] = field(default_factory=dict)  # accuracies and such, by name


ProgressCallback = Callable[[str], None]  # tells the watchdog that this rank makes progress, and what it does


class TrainingTask(Protocol):
    """A task: a model in an engine, its batches, and how it is evaluated."""

    mesh: Mesh
    engine: Engine
    fingerprint: str  # of all that decides which samples come when
    starts_from: str  # a hash of the first model, where the loss compares with it; empty: it does not
    unit: str  # what is counted: "tokens", "pairs"
    per_step: int  # of those, over all ranks
    flops: float  # of one of them, forward and backward
    notice: str  # what a reader of the log should know is missing, such as text for evaluations; empty: nothing

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        ...

    def batch(self, step: int) -> Any:
        """This rank's rows of a step. Called in a thread, so it calls no collective."""
        ...

    def accumulate(self, batch: Any) -> None:
        """Forward and backward of a step; the loop then calls `engine.step`."""
        ...

    def evaluate(self, beat: ProgressCallback) -> Evaluated | None:
        """The loss on held-out data; None when nothing is held out."""
        ...

    def finish(self, sample: int) -> str | None:
        """What to show of the trained model at the end."""
        ...


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def engine_of(config: Config, model: nn.Module, mesh: Mesh, weights: Weights | None = None) -> Engine:
    """The engine that a config asks for."""
    with warnings.catch_warnings():  # a reward model's head is new on purpose
        warnings.filterwarnings("ignore", r"not among the stored weights.*: \['score\.weight'\]$")
        engine = Engine(
            model,
            mesh,
            factory(config.optimizer),
            clip=config.optimizer.clip,
            reproducible=config.reproducible,
            offload=config.optimizer.offload,
            accumulate=config.accumulate,
            weights=weights,
            matrices=MATRICES.get(config.optimizer.name, ()),
            elementwise=config.optimizer.name in ELEMENTWISE,
        )
    if config.ema is not None:
        WeightAverage(engine, config.ema)
    return engine


def of_first_rank(make: Callable[[], str], mesh: Mesh, spelled: Callable[[Exception], DataError]) -> str:
    """What the first rank finds in files, on every rank; `spelled`: the error where it cannot."""
    mine = run_or_raise_on_all_ranks(lambda: make() if mesh.rank == 0 else "", mesh, DataError, spelled)
    return str(all_gather_object(mine, mesh)[0])


def rows_of(config: Config, mesh: Mesh) -> range:
    """This data rank's rows of a step."""
    share = config.batch // mesh.size("dp")
    return range(mesh.index("dp") * share, (mesh.index("dp") + 1) * share)


def seed_generators(config: Config, mesh: Mesh) -> None:
    """Seed torch's own generators, which checkpoints hold: they are equal in two runs of one config, and on all ranks,
    as replicas.py asks for; unless an encoder's dropout draws from them, whose masks must differ between the ranks."""
    seed = config.pairs.seed if config.pairs is not None else config.data.seed if config.data is not None else 0
    own = mesh.rank if config.pairs is not None and config.pairs.dropout else 0
    torch.manual_seed(rng.key(seed, "generators", own).seed)
