"""Closed forms of parameters and messages equal what models hold and what imagined ranks send."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import fake
from isograd.comm.handle import Handle
from isograd.comm.record import Entry, recording
from isograd.core.contract_table import contracts
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.models import TransformerConfig
from isograd.plan.comm_volume import sent
from isograd.plan.memory import COMMUNICATOR, communicators, memory
from isograd.plan.work import Work, params_on_rank

ROWS, LENGTH, MICRO = 4, 32, 2  # of one data rank
LLAMA: dict[str, Any] = {"vocab": 512, "hidden": 256, "layers": 2, "heads": 8, "kv_heads": 4, "mlp": 256}
QWEN = {**LLAMA, "qk_norm": True, "tied": True}
GPT2 = {**LLAMA, "kv_heads": None, "norm": "layer", "gated": False, "positions": "learned", "max_positions": 64,
        "qkv_bias": True, "out_bias": True, "mlp_bias": True}  # fmt: skip
WINDOWS = {**LLAMA, "layers": 3, "sliding_window": 5, "full_layers": [1]}
SPARSE = {**LLAMA, "experts": {"number": 8, "per_token": 2, "width": 64, "shared": 64, "dense_first": 1}}


def work_of(options: dict[str, Any], layout: Layout, recompute: bool | str = False, micro: int = MICRO) -> Work:
    config = TransformerConfig.from_dict(options)
    how = recompute if isinstance(recompute, str) else "full" if recompute else "none"
    return Work(model=config, length=LENGTH, batch=ROWS * layout.dp, micro_batches=micro, recompute=how)


def recorded(
    options: dict[str, Any], layout: Layout, recompute: bool | str, micro: int = MICRO, **given: Any
) -> dict[int, list[Entry]]:
    """What ranks of an imagined world send as data in their second step: every pipeline
    stage of the last column, and the first rank."""
    world = fake.FakeWorld()
    ranks = layout.ranks("pp", layout.world_size - 1) if layout.pp > 1 else (0, layout.world_size - 1)

    def step(rank: int) -> list[Entry]:
        with recording() as record:
            mesh = Mesh.imagine(layout, rank, world)
            model = ig.models.Transformer(TransformerConfig.from_dict(options), mesh, dtype=torch.bfloat16)
            model.recompute = recompute
            engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3), clip=1.0, **given)
            tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
            engine.train_step((tokens, tokens), micro)  # ZeRO 3 learns the order of blocks
            before = len(record.entries)
            engine.train_step((tokens, tokens), micro)
        entries = record.entries[before:]
        return [e for e in entries if not e.control and not e.site.startswith("engine/validation.py")]

    return world.run({rank: partial(step, rank) for rank in ranks})


@pytest.mark.parametrize(
    ("layout", "options", "recompute"),
    [
        ("dp2", LLAMA, False),
        ("dp2 zero1", GPT2, False),
        ("dp2 zero3", LLAMA, True),
        ("tp2", LLAMA, True),
        ("tp4 sp", QWEN, True),
        ("tp8 sp", LLAMA, False),
        ("tp2 sp", LLAMA, "selective"),
        ("cp2 ulysses", LLAMA, True),
        ("cp2 ring", LLAMA, False),
        ("cp4 ulysses2", LLAMA, True),
        ("pp2 vpp2", {**QWEN, "layers": 4}, False),
        ("cp4 ring zero1", WINDOWS, True),
        ("dp2 pp2 zero3", {**GPT2, "layers": 4}, True),
        ("dp2 pp2 vpp2 zero3", {**QWEN, "layers": 8}, False),
        pytest.param("dp2 tp2 sp pp2 zero2", GPT2, True, marks=pytest.mark.medium),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_in_closed_form_are_those_of_an_imagined_rank(layout: str, options: Any, recompute: bool | str) -> None:
    described = Layout.parse(layout)
    work = work_of(options, described, recompute)
    for rank, entries in recorded(options, described, recompute).items():
        bytes_by: dict[str, float] = {}
        for entry in entries:
            if entry.bytes:
                bytes_by[entry.axes] = bytes_by.get(entry.axes, 0) + entry.bytes
        # The norm of a head has one unit of 64 elements, which one owner has: its chunk is padded for the others.
        padding = 2e-4 if described.dp * described.cp > 1 and options.get("qk_norm") else 0.0
        found = sent(work, described, described.coordinates(rank))
        assert found == pytest.approx(bytes_by, rel=padding, abs=0), f"rank {rank}"


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["dp2 zero0", "dp2 zero2", "dp2 tp2 sp zero3"])
def test_bytes_of_gradients_that_leave_with_each_micro_batch(layout: str) -> None:
    described = Layout.parse(layout)
    work = replace(work_of(LLAMA, described), accumulate="sharded")
    for rank, entries in recorded(LLAMA, described, recompute=False, accumulate="sharded").items():
        bytes_by = Counter[str]()
        for entry in entries:
            bytes_by[entry.axes] += entry.bytes
        assert sent(work, described, described.coordinates(rank)) == +bytes_by


@pytest.mark.parametrize("layout", ["dp2 zero0", "dp2 zero1", "dp2 tp2 sp zero2"])
def test_gradients_of_one_micro_batch_count_as_fp32_as_on_nccl(layout: str) -> None:
    """A model in half precision has gradients in fp32, on every backend."""
    described = Layout.parse(layout)
    for rank, entries in recorded(LLAMA, described, recompute=False, micro=1).items():
        bytes_by: dict[str, float] = {}
        for entry in entries:
            if entry.bytes:
                bytes_by[entry.axes] = bytes_by.get(entry.axes, 0) + entry.bytes
        assert sent(work_of(LLAMA, described, micro=1), described, described.coordinates(rank)) == bytes_by
        leaving = {m.dtype for e in entries if e.purpose == "gradients" for to in e.sent for m in to}
        assert leaving == {torch.float32}


@pytest.mark.parametrize("options", [LLAMA, QWEN, GPT2, SPARSE], ids=["llama", "qwen", "gpt2", "experts"])
@pytest.mark.parametrize("layout", ["dp2", "tp2 sp pp2", "dp2 tp8 sp", "pp2 vpp2"])
def test_parameters_in_closed_form_are_those_of_the_model(layout: str, options: Any) -> None:
    layout = layout.replace("dp2 tp8 sp", "dp2 tp8 sp ep4") if "experts" in options else layout
    described = Layout.parse(layout)
    options = {**options, "layers": 4}
    work = work_of(options, described)
    for index in range(described.pp):
        mesh = Mesh.unbound(described, described.rank({"pp": index, "dp": 0, "cp": 0, "tp": 0}))
        table = contracts(ig.models.Transformer(TransformerConfig.from_dict(options), mesh, device="meta"), mesh)
        counted = params_on_rank(work, described, index)
        sizes = {r.name: r.parameter.numel() for r in table}
        assert counted.all == sum(sizes.values())
        assert counted.routed == sum(sizes[r.name] for r in table if r.contract.data == "edp")
        assert counted.shared == sum(sizes[r.name] for r in table if "tp" in r.contract.partial_over)
        assert counted.pairs == sum(
            sizes[r.name] for r in table if any("tp/" in axes for axes in r.contract.partial_over)
        )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("dp1", {}), ("dp2 zero1", {}), ("tp2", {}), ("dp2 tp4 sp zero1", {"kv_heads": 2}), ("dp2 cp4 ulysses2", {}),
        ("dp2 pp2", {"tied": True}), ("pp4", {"tied": True}), ("dp2 pp4 vpp2 zero1", {}),
        ("dp4 ep2", {"experts": SPARSE["experts"]}), ("dp2 tp2 ep4", {"experts": SPARSE["experts"]}),
    ],
    ids=str,
)  # fmt: skip
def test_communicators_are_those_that_imagined_ranks_make(layout: str, more: dict[str, Any]) -> None:
    """NCCL has one for each set of members and purpose (comm/world.py)."""
    described, world, options = Layout.parse(layout), fake.FakeWorld(), {**LLAMA, "layers": 8, **more}

    def made(rank: int) -> int:
        mesh = Mesh.imagine(described, rank, world)
        model = ig.models.Transformer(TransformerConfig.from_dict(options), mesh, dtype=torch.bfloat16)
        engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3), clip=1.0)
        tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
        engine.train_step((tokens, tokens), 4)
        return len({(group.purpose, group.ranks) for group in mesh._groups.values() if group.size > 1})

    column = described.ranks("pp", 0)
    found = world.run({rank: partial(made, rank) for rank in column})
    work = work_of(options, described)
    assert [communicators(work, described, index) for index in range(described.pp)] == [found[r] for r in column]
    one, both = (memory(work, described, gpu=gpu).communication for gpu in (False, True))
    assert (one, both) == (0.0, COMMUNICATOR * max(found[column[0]], found[column[-1]]))


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero2", "dp2 tp2 sp zero1"])
def test_gradients_that_nccl_has_not_sent_yet_are_in_the_memory_of_a_gpu(monkeypatch, layout: str) -> None:
    """The reducer asks whether a bucket has arrived; a device that is behind its host says no."""
    monkeypatch.setattr(Handle, "arrived_within", lambda self, seconds: False)
    described, deep = Layout.parse(layout), {**LLAMA, "layers": 8}
    mesh = Mesh.imagine(described, 0, fake.FakeWorld())
    model = ig.models.Transformer(TransformerConfig.from_dict(deep), mesh, dtype=torch.bfloat16)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3), bucket_mb=0.01)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    loss, count = model(tokens, tokens)
    engine.backward(loss, weight=count)
    pending = engine.step_state.reducer.under_way()
    waiting = sum(sum(engine.step_state.reducer.packings[bucket].sizes) * 4 for bucket, *_ in pending)
    assert len(pending) > 2
    monkeypatch.setattr("isograd.plan.memory.BUCKETS", 3 * 0.01 * 2**20)
    work = work_of(deep, described, micro=1)
    due = 4 * sum(p.numel() for p in model.parameters()) / 2
    assert memory(work, described, gpu=True).gradients - due == pytest.approx(waiting, rel=0.01)
    assert memory(work, described).gradients - due < 0.9 * waiting
