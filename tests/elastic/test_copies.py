"""What partners hold of each other: the same bits, for nothing on the wire on one machine, one message elsewhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.checkpoint import CheckpointManager
from isograd.checkpoint.write import SaveJob, finish
from isograd.comm.consensus import all_gather_object
from isograd.comm.record import recording
from isograd.elastic.copies import Copies, joined, offers, write
from isograd.elastic.shared_memory import SharedMemory
from isograd.engine import state
from isograd.engine.state import Part
from tests.checkpoint import toys


def part(key: str, values: torch.Tensor) -> Part:
    return Part(key, tuple(values.shape), tuple((0, n) for n in values.shape), values, (0, len(values)))


def test_a_neighbour_sees_what_the_owner_of_a_room_has_filled_in_and_when_it_has_changed() -> None:
    memory, values = SharedMemory(), [part("a", torch.randn(3, 5)), part("b", torch.randn(7).bfloat16())]
    assert memory.fd is not None
    other = SharedMemory.of(os.getpid(), memory.fd, memory.token)
    assert other is not None
    assert other.step is None
    memory.fill(4, values, {"counts": {"step": 4}})
    values.append(part("c", torch.arange(10_000)))
    memory.fill(6, values, {"counts": {"step": 6}})
    rows = other.rows()
    assert (other.step, rows.note["counts"], rows.damaged) == (6, {"step": 6}, False)
    for copy, one in zip(rows.copied(), values, strict=True):
        assert (copy.key, copy.shape, copy.box) == (one.key, one.shape, one.box)
        assert torch.equal(copy.tensor, one.tensor)
    memory.bytes[memory.size - 9] ^= 4
    assert rows.damaged
    memory.filling()
    assert other.step is None
    assert SharedMemory.of(os.getpid(), memory.fd, memory.token + 1) is None
    assert SharedMemory.of(os.getpid(), 99_999, memory.token) is None


def steps(layout: str, name: str, machines: bool, folder: Path, partner: bool = True) -> dict[str, Any]:
    """Four steps with copies; each rank's messages of a step, and how the copies of the last one compare."""
    real, engine = socket.gethostname, toys.engine_of(layout, dtype=torch.float32)
    mesh = engine.mesh
    socket.gethostname = lambda: f"host{mesh.rank if machines else 0}"
    mine = Copies(engine, name, {}, partner=partner)
    sent: list[list[int]] = []
    try:
        for step in range(1, 5):
            engine.accumulate(toys.batch(step, mesh), 2)
            with recording() as before:
                mine.finish()
            engine.step()
            with recording() as after:
                mine.start(step)
            entries = before.entries + after.entries
            sent.append([message.bytes for entry in entries for to in entry.sent for message in to])
    finally:
        socket.gethostname = real
    mine.finish()
    all_gather_object(None, mesh)  # a rank sees what its neighbour has filled in: in a step the vote comes between
    mine.close(failed=True)
    found = {rank: [memory.step for memory in memories] for rank, memories in mine._mine.memories.items()}
    own = sum(p.written[1].nbytes for p in mine._parts[1])
    holder = mine._mine.memories
    equal = {r: holder[r][0].rows().note["sum"] for r in holder}
    told_sums = all_gather_object(equal.get(mesh.rank), mesh)
    same = all(told_sums[rank] == found_sum for rank, found_sum in equal.items())
    damaged = any(memory.rows().damaged for memories in holder.values() for memory in memories)
    offered = [(offer.step, offer.of) for offer in offers(name)]
    if mesh.rank == 0:
        (folder / "step").mkdir(parents=True)
    all_gather_object(None, mesh)
    world = mine._mine.world
    heads = all_gather_object(write(world, 4, [mesh.rank], folder, folder / "step"), mesh)
    for head in heads:  # JSON made its numbers words
        head["runs"] = {int(rank): run for rank, run in head["runs"].items()}
    if mesh.rank == 0:
        finish(
            SaveJob(folder, folder / "step", 4, 0, len(heads), joined(heads), (), {}, 1, None, lambda _: None),
            lambda: None,
        )
    all_gather_object(None, mesh)
    before = _sums(engine)
    with CheckpointManager(folder, engine) as keeper:
        assert keeper.load() is not None
    return {"sent": sent, "held": found, "same": same, "damaged": damaged, "offered": offered, "own": own,
            "loaded": _sums(engine) == before}  # fmt: skip


def _sums(engine: Any) -> dict[str, Any]:
    entries = state.elementwise(engine, state.declare(engine))
    return {part.key: part.tensor.double().sum().item() for part in state.parts(engine, entries)}


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["dp2 zero1", "pp2", "dp2 zero3"])
def test_on_one_machine_nothing_is_sent_and_elsewhere_one_message_a_step(worlds, tmp_path: Path, layout: str) -> None:
    """A machine apart: its rows, and a page of notes; nothing else, and no control values."""
    for machines in (False, True):
        for rank, found in enumerate(
            worlds(2).run(steps, layout, f"{layout} {machines}", machines, tmp_path / str(machines))
        ):
            case = layout, machines, rank
            assert found["held"] == {0: [4, 3], 1: [4, 3]}, case
            assert found["same"] and found["loaded"] and not found["damaged"], case
            assert sorted(found["offered"]) == [(3, (rank, 1 - rank)), (4, (rank, 1 - rank))], case
            for messages in found["sent"][2:]:  # the first one has told all ranks what there is
                if machines:
                    assert len(messages) == 1, (case, messages)
                    assert found["own"] <= messages[0] + 8 <= found["own"] + 64 * 1024, (case, messages)
                else:
                    assert messages == [], case


@pytest.mark.medium
def test_where_all_ranks_hold_the_whole_state_nothing_is_copied_and_nothing_is_lost(worlds, tmp_path: Path) -> None:
    for partner in (True, False):
        for found in worlds(2).run(steps, "dp2 zero0", f"live {partner}", True, tmp_path / str(partner), partner):
            assert (found["held"], found["sent"][1:]) == ({}, [[], [], []])
            assert found["offered"] == [(4, (0, 1))]
            assert found["loaded"]
