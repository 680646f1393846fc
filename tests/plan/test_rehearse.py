"""A rehearsal passes a right program, and names what is planted in a wrong one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from isograd.comm import raw
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine, state
from isograd.engine.plan import Slot
from isograd.engine.reducer import Reducer
from isograd.engine.state import Part
from isograd.engine.step import StepState
from isograd.models import Transformer, TransformerConfig
from isograd.plan.check import Mismatch, check
from isograd.plan.rehearse import RehearsedRank, kinds, rehearse, without_memory
from isograd.plan.shapes import Shapes
from tests.comm.test_fake import comparable, imagined_ranks

CONFIG = TransformerConfig(vocab=102, hidden=96, layers=2, heads=4, kv_heads=2, mlp=200, qk_norm=True, tied=True)


def build(mesh: Mesh) -> tuple[Engine, Any, int]:
    """Activations and matrices of this model are large for SIZE, norms are not."""
    model = without_memory(Transformer(CONFIG, mesh, device="meta"))
    engine = Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, fused=True), clip=1.0, bucket_mb=0.025)
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    return engine, (tokens, tokens), 2 if mesh.size("pp") > 1 else 1


SIZE = 8000  # more than a bucket of small parameters has


def step(layout: str) -> list[RehearsedRank]:
    return rehearse(build, Layout.parse(layout), large=SIZE)


def wrong(layout: str) -> list[Mismatch]:
    return check(step(layout), Layout.parse(layout))


@pytest.mark.parametrize("layout", ["tp2 sp"])
def test_a_rank_without_memory_sends_what_one_with_memory_does(layout: str) -> None:
    whole = imagined_ranks(layout)
    with Shapes(200):
        hollow = imagined_ranks(layout)
    assert [comparable(record) for record in hollow] == [comparable(record) for record in whole]


@pytest.mark.parametrize("layout", ["dp3", "dp2 tp2 sp zero1", "cp2 ulysses tp2 zero2", "dp2 pp2 zero1"])
def test_a_right_program_passes(layout: str) -> None:
    ranks = step(layout)
    assert check(ranks, Layout.parse(layout)) == []
    assert all(rank.expected and rank.parameters and rank.states for rank in ranks)


def test_kinds_are_ranks_with_equal_programs() -> None:
    ranks = step("pp2")
    assert [[rank.rank for rank in kind] for kind in kinds([*ranks, ranks[0]])] == [[0, 0], [1]]


def test_a_rank_of_zero3_keeps_rows_and_a_doubled_reduction_is_named(monkeypatch) -> None:
    ranks, whole = step("dp2 zero3"), step("dp2 zero2")
    assert check(ranks, Layout.parse("dp2 zero3")) == []
    assert ranks[0].parameters == pytest.approx(whole[0].parameters / 2, rel=0.02)
    size = whole[0].parameters
    for rank in whole:  # a step sends 2 (W-1)/W of the parameters; their first values are no part of it
        moved = sum(entry.bytes for entry in rank.step if entry.axes == "dp cp")
        first = sum(entry.bytes for entry in rank.entries[: rank.start] if "broadcast" in entry.operation)
        assert (moved, first) == (pytest.approx(size, rel=0.01), size if rank.rank == 0 else 0)
        assert rank.peak.left["gradients"] == 0 < rank.peak.most["gradients"]
    launch = Reducer.launch

    def twice(self: Reducer, bucket: Any, gradients: Any, sums: Any) -> None:
        for _ in range(2):
            launch(self, bucket, list(gradients), sums)

    monkeypatch.setattr(Reducer, "launch", twice)
    assert "is sent 2 times over the data axes" in wrong("dp2 zero3")[0].what


@pytest.mark.parametrize("layout", ["tp2 sp", "dp2 tp2 sp zero3"])
def test_a_missing_reduction_is_named(monkeypatch, layout: str) -> None:
    pay = StepState._all_reduce_partials
    monkeypatch.setattr(StepState, "_all_reduce_partials", lambda self, axes, slots, of: pay(self, axes, slots[1:], of))
    found = wrong(layout)
    assert {f.kind for f in found} == {"reductions"}
    assert "the gradient of 'blocks.0.attention" in found[0].what
    assert "over no group; its contract says once over [" in found[0].what


def test_a_large_sum_counts_once_for_what_this_rank_adds_up_itself_too(monkeypatch) -> None:
    """It is sent in two halves: each rank's part to it, and the sums of its own part to all."""
    monkeypatch.setattr(raw, "SMALL_BYTES", 64)
    ranks = step("tp4 sp")
    assert any(entry.operation == "all_reduce/reduce_scatter" for entry in ranks[0].entries)
    assert check(ranks, Layout.parse("tp4 sp")) == []
    pay = StepState._all_reduce_partials

    def twice(self: StepState, axes: str, slots: Any, due: Any) -> None:
        pay(self, axes, slots, due)
        pay(self, axes, slots[:1], due)

    monkeypatch.setattr(StepState, "_all_reduce_partials", twice)
    assert any("is summed 2 times over ranks [0, 1, 2, 3]" in finding.what for finding in wrong("tp4 sp"))


def test_a_doubled_reduction_is_named(monkeypatch) -> None:
    pay = StepState._all_reduce_partials

    def twice(self: StepState, axes: str, slots: Any, due: Any) -> None:
        pay(self, axes, slots, due)
        pay(self, axes, slots[:1], due)

    monkeypatch.setattr(StepState, "_all_reduce_partials", twice)
    found = wrong("tp2 sp")
    assert "summed 2 times over ranks [0, 1]; its contract says once over [0, 1]" in found[0].what


def test_a_wrong_group_is_named(monkeypatch) -> None:
    pay = StepState._all_reduce_partials
    monkeypatch.setattr(StepState, "_all_reduce_partials", lambda self, axes, slots, of: pay(self, "dp cp", slots, of))
    found = [f.what for f in wrong("dp2 tp2 sp") if f.kind == "reductions"]
    assert found[0].startswith("rank 0: the gradient of 'blocks.0")
    assert found[0].endswith("is summed 1 times over ranks [0, 2]; its contract says once over [0, 1]")


def test_a_swapped_order_is_named(monkeypatch) -> None:
    """Rank 1 sums the two halves of what it owes in another order."""
    pay = StepState._all_reduce_partials

    def halves(self: StepState, axes: str, slots: Any, due: Any) -> None:
        parts = [slots[:3], slots[3:]]
        for part in parts if self.mesh.rank == 0 else parts[::-1]:
            pay(self, axes, part, due)

    monkeypatch.setattr(StepState, "_all_reduce_partials", halves)
    (finding, *_) = wrong("tp2 sp")
    assert finding.kind == "messages"
    assert "from rank 0 to rank 1" in finding.what
    assert "all_reduce in engine/step.py:_all_reduce_partials" in finding.what


def test_ranks_that_wait_for_each_other_in_a_circle_are_named(monkeypatch) -> None:
    """Both ranks first wait for the other's message, and then send their own."""

    def program(mesh: Mesh) -> tuple[Engine, Any, int]:
        made = build(mesh)
        group, peer, x = mesh.group("dp"), 1 - mesh.index("dp"), torch.zeros(3)
        raw.receive_start([torch.zeros(3)], group, peer).wait()
        raw.send_start([x], group, peer).wait()
        return made

    found = check(rehearse(program, Layout.parse("dp2")), Layout.parse("dp2"))
    assert [f.kind for f in found] == ["waits", "waits"]
    assert "rank 0 waits for ranks [1] in receive_start over 'dp'" in found[0].what


def test_a_norm_that_counts_a_replica_is_named(monkeypatch) -> None:
    from isograd.engine import norm

    monkeypatch.setattr(norm, "counted", lambda slots, mesh: list(slots))
    found = wrong("tp2 sp")
    assert {f.kind for f in found} == {"norm"}
    assert found[0].what.startswith("rank 1: of 'blocks.0")


@pytest.mark.parametrize("layout", ["dp3 zero1", "tp2 sp", "dp2 pp2 zero1", "dp2 zero3"])
def test_a_hole_and_an_overlap_of_a_checkpoint_are_named(monkeypatch, layout: str) -> None:
    part = state._part

    def by(first: int, last: int) -> Any:
        """Rank 1 writes rows of the matrices of MLPs from `first` to `last` further on."""

        def moved(key: str, slot: Slot, tensor: torch.Tensor, mesh: Mesh) -> Part:
            found = part(key, slot, tensor, mesh)
            start, stop = found.writes
            if mesh.rank != 1 or "mlp.up" not in key or not stop:
                return found
            return replace(found, writes=(start + first, stop + last))

        return moved

    monkeypatch.setattr(state, "_part", by(0, -1))
    found = wrong(layout)
    assert {f.kind for f in found} == {"checkpoint"}
    assert len(found) == 3 * (1 if "pp2" in layout else 2)  # the matrix and two moments of each layer
    assert "elements are written by no rank; the first at [" in found[0].what
    assert any(f.what.startswith("of 'model/blocks.0.mlp.up.weight', 96 of 19200") for f in found)
    if layout != "dp3 zero1":
        return
    monkeypatch.setattr(state, "_part", by(-1, 0))
    found = wrong(layout)
    assert {f.kind for f in found} == {"checkpoint"}
    assert "96 of 19200 elements are written by several ranks: [0, 1]; the first at [" in found[0].what


def test_replicas_that_both_write_are_named(monkeypatch) -> None:
    part = state._part
    monkeypatch.setattr(
        state, "_part", lambda key, slot, tensor, mesh: replace(part(key, slot, tensor, mesh), writes=(0, len(tensor)))
    )
    assert any("are written by several ranks: [0, 1]" in f.what for f in wrong("dp2 zero1"))


def test_as_many_rehearsals_as_one_likes_are_held_at_once() -> None:
    held = []
    for _ in range(40):  # a process has addresses for 31 ranges
        with Shapes(large=100) as rehearsal:
            held.append((rehearsal, torch.empty(1000) + 1))
    assert len({tensor.data_ptr() for _, tensor in held}) == 40
