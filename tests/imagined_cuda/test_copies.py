"""Copies of the state for a partner on another machine leave host memory by gloo, beside NCCL."""

from __future__ import annotations

import socket

import pytest

from tests.parity import cases

from . import right, run


def copied(layout: str) -> tuple[int, dict[int, int], dict[int, bool]]:
    """(messages between hosts, {rank: checksum of its rows here}, {rank: whether they are whole})."""
    from isograd import Engine, Mesh
    from isograd.comm import raw
    from isograd.comm.consensus import all_gather_object
    from isograd.comm.record import recording
    from isograd.elastic.copies import Copies
    from isograd.models import Transformer

    mesh, config = Mesh(layout), cases.CONFIGS["llama"]
    assert raw.is_nccl(mesh.group("world"))
    socket.gethostname = lambda: f"host{mesh.rank}"
    engine = Engine(Transformer(config, mesh).to(mesh.device), mesh, cases.sgd, bucket_mb=0.01)
    copies = Copies(engine, "run", {})
    with recording() as record:
        for step in (1, 2):
            tokens, labels, _ = (t.to(mesh.device) for t in cases.micro_batch(config, step, mesh.index("dp"), 4))
            engine.accumulate([{"tokens": tokens, "labels": labels}])
            copies.finish()
            engine.step()
            copies.start(step)
    copies.finish()
    all_gather_object(None, mesh)
    rows = {rank: memories[0].rows() for rank, memories in copies._mine.memories.items()}
    copies.close(failed=False)
    messages = sum(entry.purpose == "copies" for entry in record.entries)
    return messages, {r: one.note["sum"] for r, one in rows.items()}, {r: not one.damaged for r, one in rows.items()}


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_a_partner_holds_what_its_owner_holds(layout: str) -> None:
    (sent, mine, whole), (_, theirs, _) = right(run(copied, 2, layout, join=False, seconds=20, limit=60))
    assert sent
    assert mine == theirs
    assert mine.keys() == {0, 1}
    assert all(whole.values())
