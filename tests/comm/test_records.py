"""Records of imagined ranks equal those of running ones, message for message: every axis, stage and schedule, and all
that a run does beside its steps, in worlds of 2, 4 and 8 ranks.

Each program is run by gloo ranks and by imagined ranks of the same layout. Data differ from rank to rank; what an
imagined rank receives are zeros.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import isograd as ig
from isograd.comm import fake
from isograd.comm.record import Entry, recording
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import ChainedOptimizer, Engine, Shards
from isograd.losses.contrastive import GradientCache, InfoNCE, SigLIP
from isograd.models import Transformer, TransformerConfig
from tests.comm.test_fake import comparable
from tests.losses.contrastive.toys import Towers, batch, sgd

OPTIONS: dict[str, Any] = {"vocab": 101, "hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "mlp": 40}
MODELS: dict[str, dict[str, Any]] = {
    "llama": OPTIONS,
    "tied": {**OPTIONS, "qk_norm": True, "tied": True},
    "gpt2": {**OPTIONS, "kv_heads": None, "norm": "layer", "gated": False, "positions": "learned", "max_positions": 64,
             "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True},
    "windows": {**OPTIONS, "sliding_window": 5, "full_layers": (1,)},
    "dropout": {**OPTIONS, "dropout": 0.1},
}  # fmt: skip


class Case(NamedTuple):
    """What is run."""

    layout: str
    model: str = "llama"
    also: str = ""  # words: what the program does otherwise, or beside its step

    def __str__(self) -> str:
        return " ".join(filter(None, (self.layout, self.model, self.also)))


CASES = {
    2: [
        *(Case(layout) for layout in ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2 ulysses")),
        *(Case(layout, "tied") for layout in ("cp2 ring", "pp2", "pp2 gpipe", "pp2 vpp2", "pp2 zb", "pp2 zero3")),
        Case("dp2 zero1", "gpt2", "recompute saves"),
        Case("dp2 zero3", "tied", "recompute saves"),
        Case("tp2 sp", "gpt2", "saves"),
        Case("pp2 zb", "gpt2", "recompute saves"),
        Case("dp2 zero3", "llama", "keep_gathered"),
        Case("dp2 zero2", "llama", "sharded"),
        Case("dp2 zero1", "llama", "reproducible"),
        Case("dp2", "llama", "at_end"),
        Case("dp2 zero1", "llama", "muon"),
        Case("tp2 zero1", "tied", "muon"),
        Case("cp2 ring", "windows"),
        Case("cp2 ulysses", "windows", "recompute"),
        Case("cp2 ulysses zero3", "dropout"),
        *(Case(layout, "llama", "cached") for layout in ("dp2 zero1", "dp2 zero3", "tp2 sp", "cp2 ring")),
    ],
    4: [
        Case("dp2 tp2 zero1", "gpt2", "saves"),
        Case("dp2 tp2 sp zero3", "tied", "recompute"),
        Case("dp2 pp2 zero2"),
        Case("dp2 pp2 vpp2 zero3", "tied"),
        Case("cp2 ring tp2 sp zero1", "tied"),
        Case("cp2 ulysses tp2 zero2", "gpt2", "recompute"),
        Case("cp4 ulysses2", "windows"),
        Case("dp2 cp2 ring zero3", "windows"),
        Case("cp2 ulysses pp2 zb zero1", "tied", "saves"),
        Case("tp2 sp pp2 gpipe", "gpt2"),
        Case("tp4 sp", "tied"),
        Case("pp4", "gpt2"),
        Case("pp4 zb", "llama", "recompute"),
        *(Case(layout, "llama", "cached") for layout in ("dp2 tp2 zero1", "dp4 zero2", "dp2 cp2 ulysses zero3")),
    ],
    8: [
        Case("dp2 tp2 sp pp2 zero1", "tied", "saves"),
        Case("dp2 cp2 ring tp2 sp zero2", "tied"),
        Case("dp2 cp2 ulysses tp2 zero3", "gpt2", "recompute"),
        Case("dp8", "tied", "saves"),  # at zero3 the last rank owns no row of it, and imagines that nobody does
        Case("dp8 zero3", "tied"),
        Case("dp4 zero1 cp2 ulysses", "windows"),
        Case("dp2 cp4 ulysses2 zero1", "tied"),
        Case("dp2 pp4 zb zero1", "tied"),
        Case("pp4 tp2 sp", "gpt2"),
        Case("dp2 tp2 pp2 vpp2 zero3", "llama"),
        Case("cp2 ring dp2 pp2 gpipe zero1", "llama", "recompute"),
        Case("tp8 sp", "tied"),
        *(Case(layout, "llama", "cached") for layout in ("dp4 tp2 zero1", "dp2 cp2 tp2 sp zero3", "dp8")),
    ],
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def joined(shards: Shards) -> ChainedOptimizer:
    return ChainedOptimizer(torch.optim.Muon(shards.matrices, lr=0.01), adamw(shards.rest))


def trained(mesh: Mesh, case: Case, folder: Path) -> None:
    """A step, an evaluation and perhaps a checkpoint of a decoder."""
    words = case.also.split()
    model = Transformer(TransformerConfig.from_dict(MODELS[case.model]), mesh)
    model.recompute = "recompute" in words
    more: dict[str, Any] = {}
    if "muon" in words:
        more["matrices"] = ["blocks.*.weight"]
    if "sharded" in words:
        more["accumulate"] = "sharded"
    if "at_end" in words:
        more["overlap"] = False
    for word in ("keep_gathered", "reproducible"):
        more[word] = word in words
    engine = Engine(model, mesh, joined if "muon" in words else adamw, clip=1.0, bucket_mb=0.01, **more)
    tokens = torch.randint(0, 101, (4, 16), generator=torch.Generator().manual_seed(mesh.index("dp")))
    batch: dict[str, Any] = {"tokens": tokens, "labels": tokens}
    if case.model == "dropout":
        batch |= {"key": ig.rng.key(3), "samples": torch.arange(4)}
    engine.train_step(batch, 2)
    engine.evaluate(batch, 2)
    if "saves" in words:
        saved(engine, folder / str(case).replace(" ", "-"))


def saved(engine: Engine, folder: Path) -> None:
    """What ranks say to each other until a checkpoint is copied. How often they ask whether it is written depends on
    time; and in an imagined world the other ranks write theirs later, or never."""
    with mock.patch("isograd.checkpoint.folder.job_name", lambda: "a job"):
        keeper = ig.checkpoint.CheckpointManager(folder, engine)
    keeper.save(1)
    writing = keeper._writing
    assert writing is not None
    writing.given_up.set()
    writing.join()
    assert writing.error is None
    if keeper._lock is not None:
        keeper._lock.close()


def cached(mesh: Mesh) -> None:
    """Steps of GradCache: two losses, chunks of other sizes than the rows."""
    for loss in (InfoNCE(mesh, learn_scale=True, both=True), SigLIP(mesh)):
        model = Towers(loss, mesh, tied=False, decoder=True)
        engine = Engine(model, mesh, sgd, bucket_mb=0.0005)
        cache = GradientCache(engine, model.loss, encode=[model.query, model.document], chunk=3)
        cache.backward(*batch(0, 0, "empty").towers)
        engine.step()


def recorded(make: Callable[[str], Mesh], case: Case, folder: Path) -> list[Entry]:
    """What this rank says in a program."""
    with recording() as record:
        mesh = make(case.layout)
        cached(mesh) if case.also == "cached" else trained(mesh, case, folder)
    return comparable(record.entries)


def running(cases: list[Case], folder: Path) -> list[list[Entry]]:
    return [recorded(Mesh, case, folder) for case in cases]


def imagined_ranks(case: Case, folder: Path) -> dict[int, list[Entry]]:
    """By rank. As in a rehearsal, a rank of each stage runs together with those of the others, in a world in which all
    further ranks agree with these."""
    layout = Layout.parse(case.layout)
    found: dict[int, list[Entry]] = {}

    def step(rank: int, world: fake.FakeWorld) -> list[Entry]:
        return recorded(lambda layout: Mesh.imagine(layout, rank, world), case, folder)

    for column in layout.groups("pp"):
        world = fake.FakeWorld()
        found |= world.run({rank: partial(step, rank, world) for rank in column})
    return found


EVERY = [pytest.param(ranks, 1, marks=pytest.mark.slow, id=f"{ranks} ranks, all cases") for ranks in CASES]
SOME = [pytest.param(ranks, 5, id=f"{ranks} ranks, every fifth case") for ranks in (2, 4)]


@pytest.mark.parametrize(("ranks", "step"), [*SOME, *EVERY])
def test_imagined_ranks_say_what_running_ones_do(worlds, ranks: int, step: int, tmp_path: Path) -> None:
    cases = CASES[ranks][::step]
    (tmp_path / "running").mkdir()
    real = worlds(ranks).run(running, cases, tmp_path / "running")
    for number, case in enumerate(cases):
        (tmp_path / "imagined").mkdir()
        for rank, record in imagined_ranks(case, tmp_path / "imagined").items():
            assert len(record) > 10
            assert difference(record, real[rank][number]) == "", f"{case}, rank {rank}"
        shutil.rmtree(tmp_path / "imagined")


def difference(one: list[Entry], other: list[Entry]) -> str:
    """The first message in which two records differ."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"entry {number} of {len(one)} and {len(other)}: {a!r} and {b!r}"
    return "" if len(one) == len(other) else f"{len(one)} and {len(other)} entries"
