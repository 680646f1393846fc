"""An imagined rank sends and receives what a running rank does, message for message."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import isograd as ig
from isograd.comm import fake, raw
from isograd.comm.consensus import all_gather_object
from isograd.comm.record import Entry, recording
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import CommError

TWO = ("dp2", "dp2 zero1", "dp2 zero3", "tp2", "tp2 sp", "cp2 ulysses", "cp2 ring", "pp2", "pp2 vpp2", "pp2 zb")
FOUR = ("dp2 tp2 zero1", "dp2 pp2 zero2")


def program(mesh: Mesh) -> None:
    """A model, an engine and one step. Its first values, and the tokens of data ranks, differ from rank to rank."""
    config = ig.models.TransformerConfig(vocab=101, hidden=24, layers=4, heads=4, kv_heads=2, mlp=40)
    model = ig.models.Transformer(config, mesh)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3), clip=1.0, bucket_mb=0.01)
    tokens = torch.randint(0, 101, (4, 16), generator=torch.Generator().manual_seed(mesh.index("dp")))
    engine.train_step((tokens, tokens), 2)


def running(layouts: tuple[str, ...]) -> dict[str, list[Entry]]:
    """What this rank of a running world records of each layout."""
    found = {}
    for layout in layouts:
        with recording() as record:
            program(Mesh(layout))
        found[layout] = record.entries
    return found


def imagined_ranks(layout: str) -> list[list[Entry]]:
    """What imagined ranks record that run together."""
    world = fake.FakeWorld()

    def recorded(rank: int) -> list[Entry]:
        with recording() as record:
            program(Mesh.imagine(layout, rank, world))
        return record.entries

    return list(world.run({r: partial(recorded, r) for r in range(Layout.parse(layout).world_size)}).values())


def comparable(record: list[Entry]) -> list[Entry]:
    """By connections: when a bucket of gradients leaves between other messages depends on time, the order of buckets
    does not. Tags are numbers that a process counts up."""
    tags: dict[int, int] = {}
    ordered = sorted(record, key=lambda entry: entry.purpose)
    timeless = [entry._replace(phase="") if entry.purpose == "gradients" else entry for entry in ordered]
    return [entry._replace(tag=tags.setdefault(entry.tag, len(tags))) for entry in timeless]


@pytest.mark.parametrize(("ranks", "layouts"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "dp2 tp2 and dp2 pp2: 4 ranks"])
def test_the_record_of_an_imagined_rank_is_that_of_a_running_one(worlds, ranks: int, layouts: tuple[str, ...]) -> None:
    real = worlds(ranks).run(running, layouts)
    for layout in layouts:
        for rank, record in enumerate(imagined_ranks(layout)):
            assert len(record) > 10
            assert comparable(record) == comparable(real[rank][layout]), f"{layout}, rank {rank}"


def test_a_record_names_the_call_its_site_its_phase_and_whether_ranks_decide_by_it() -> None:
    with recording() as record:
        program(Mesh.imagine("tp2 sp"))
    found = {(e.operation, e.site, e.phase, e.control) for e in record.entries}
    assert ("all_gather", "nn/stream.py:gather_tokens (all_gather)", "", False) in found
    assert ("reduce_scatter", "engine/step.py:run_backward (all_gather)", "backward", False) in found
    assert ("gather", "engine/norm.py:global_norm", "", True) in found
    assert [kind for kind, place in record.events if place == 0] == ["starts", "waits"]


def test_nothing_is_noted_outside_of_recording() -> None:
    with recording() as record:
        pass
    raw.all_reduce(torch.ones(3), Mesh.imagine("tp2").group("tp"))
    assert not record.entries


def test_data_arrive_as_zeros_and_control_as_agreement_in_a_world_of_16384() -> None:
    mesh = Mesh.imagine("dp128 tp8 pp16", 8191)
    world = mesh.group("world")
    assert all_gather_object("aye", mesh) == ["aye"] * 16384
    assert raw.all_reduce(torch.ones(3), mesh.group("tp")).tolist() == [1.0] * 3
    assert raw.all_max(torch.tensor(5), world) == 5


def test_ranks_that_run_together_hear_what_the_others_say() -> None:
    world = fake.FakeWorld()

    def says(rank: int) -> list[int]:
        group = Mesh.imagine("pp3", rank, world).group("pp")
        return [int(n) for n in raw.gather_list(torch.tensor(7 + rank), group)]

    found = world.run({rank: partial(says, rank) for rank in (2, 0, 1)})
    assert found == {rank: [7, 8, 9] for rank in (0, 1, 2)}


def test_a_gather_after_words_that_went_one_way_alone_hears_what_the_other_says_there() -> None:
    world = fake.FakeWorld()

    def says(rank: int) -> list[int]:
        group = Mesh.imagine("pp2", rank, world).group("pp")
        if rank == 0:
            raw.send_start([torch.tensor([5])], group, 1, control=True).wait()
        else:
            raw.receive_start([torch.tensor([0])], group, 0, control=True).wait()
        return [int(n) for n in raw.gather_list(torch.tensor(7 + rank), group)]

    assert world.run({rank: partial(says, rank) for rank in (0, 1)}) == {0: [7, 8], 1: [7, 8]}


def test_an_error_of_one_rank_ends_all_and_a_circle_of_waits_ends() -> None:
    world = fake.FakeWorld()

    def waits(rank: int, fails: bool) -> None:
        group = Mesh.imagine("pp2", rank, world).group("pp")
        if fails and rank == 1:
            raise ValueError("rank 1 fails")
        raw.receive_start([torch.zeros(2)], group, 1 - rank, control=True).wait()

    with pytest.raises(ValueError, match="rank 1 fails"):
        world.run({rank: partial(waits, rank, True) for rank in (0, 1)})
    with pytest.raises(CommError, match="IG206"):
        world.run({rank: partial(waits, rank, False) for rank in (0, 1)})


def test_a_word_that_nobody_has_said_is_an_error() -> None:
    group = Mesh.imagine("pp2", 1).group("pp")
    with pytest.raises(CommError, match="IG206"):
        raw.receive_start([torch.zeros(2)], group, 0, control=True).wait()
