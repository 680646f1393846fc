"""Experts are rehearsed with a stated load: what is sent is what running ranks send whose tokens choose like that."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from isograd.comm import fake
from isograd.comm.record import Entry, recording
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.models import Transformer, TransformerConfig
from isograd.nn.moe import MoE
from isograd.nn.routing import ExpertOptions
from isograd.plan.check import check
from isograd.plan.rehearse import evenly, rehearse, without_memory
from tests.comm.test_fake import comparable

EXPERTS = {"number": 8, "per_token": 2, "width": 20, "shared": 12, "balance": "lagged", "z_weight": 0.01}
CONFIG = TransformerConfig.from_dict(
    {"vocab": 101, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 40, "experts": EXPERTS}
)
RUN = {
    2: ("dp2 ep2", "tp2 sp ep2 zero1", "dp2 ep2 zero3"),
    4: ("dp4 ep2 zero1", "dp2 tp2 ep4", "dp2 ep2 pp2"),
    8: ("dp4 tp2 sp ep8 zero1", "dp2 cp2 ring tp2 ep2 zero3", "dp2 tp2 sp pp2 ep4", "dp4 pp2 zb ep4 zero2"),
}


def engine(mesh: Mesh, device: str | None = None) -> Engine:
    model = Transformer(CONFIG, mesh, device=device)
    if device == "meta":
        without_memory(model)
    return Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3), clip=1.0, bucket_mb=0.01)


def recorded(mesh: Mesh) -> list[Entry]:
    """What a rank sends in a step whose tokens choose experts evenly."""
    with recording() as record:
        made = engine(mesh)
        for module in made.model.modules():
            if isinstance(module, MoE):
                module.choose = evenly
        tokens = torch.randint(0, 101, (4, 16), generator=torch.Generator().manual_seed(mesh.index("dp")))
        made.train_step((tokens, tokens), 2)
    return comparable(record.entries)


def running(layouts: tuple[str, ...]) -> dict[str, list[Entry]]:
    return {layout: recorded(Mesh(layout)) for layout in layouts}


@pytest.mark.medium
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_imagined_ranks_with_an_even_load_send_what_running_ones_do(worlds, ranks: int) -> None:
    real = worlds(ranks).run(running, RUN[ranks])
    for layout in RUN[ranks]:
        found: dict[int, list[Entry]] = {}
        for column in Layout.parse(layout).groups("pp"):  # a rank of each stage
            world = fake.FakeWorld()

            def step(rank: int, layout: str = layout, world: fake.FakeWorld = world) -> list[Entry]:
                return recorded(Mesh.imagine(layout, rank, world))

            found |= world.run({rank: partial(step, rank) for rank in column})
        assert any("exchange_rows" in entry.site for entry in found[0])
        for rank in range(ranks):
            assert found[rank] == real[rank][layout], f"{layout}, rank {rank}"


def build(mesh: Mesh) -> tuple[Engine, Any, int]:
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    return engine(mesh, "meta"), (tokens, tokens), 2


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["dp4 ep2 zero1", "dp2 tp2 sp ep4"])
def test_a_program_with_experts_passes(layout: str) -> None:
    ranks = rehearse(build, Layout.parse(layout), large=30)  # a number of each token is too many
    assert check(ranks, Layout.parse(layout)) == []
    assert any("exchange_rows" in e.site for e in ranks[0].entries)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(64, 8, 2), (100, 7, 3), (33, 128, 8), (5, 4, 4)])
def test_tokens_choose_different_experts_as_often_as_stated(tokens: int, experts: int, k: int) -> None:
    found = evenly(torch.zeros(tokens, experts), ExpertOptions(number=experts, per_token=k, width=1))
    assert found.shape == (tokens, k)
    assert all(len(set(row)) == k for row in found.tolist())
    counts = found.flatten().bincount(minlength=experts)
    assert counts.max() - counts.min() <= 1
