"""Ranks as threads compute what ranks as gloo processes compute, bit for bit; and end as they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import raw, threads, world
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from tests.parity import cases

# One layout of each axis, and of each primitive that layers use.
LAYOUTS = [
    ("dp2", "llama"), ("dp3 zero2", "gpt2"), ("dp2 zero1", "qwen"), ("tp2", "gpt2"), ("dp2 tp2 sp zero1", "qwen"),
    ("cp2 ring", "llama"), ("cp2 ulysses", "qwen"), ("cp4 ulysses2", "llama"), ("tp4", "llama"),
]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize(("layout", "model"), LAYOUTS, ids=[layout for layout, _ in LAYOUTS])
def test_threads_give_the_bits_of_gloo(worlds, layout: str, model: str) -> None:
    ranks, case = Layout.parse(layout).world_size, cases.Case(layout, model, 3)
    for one, other in zip(worlds(ranks).run(case.run), threads.run(case.run, ranks, timeout=100), strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        for mine, theirs in zip(one.gradients, other.gradients, strict=True):
            assert mine.keys() == theirs.keys() and all(torch.equal(g, theirs[name]) for name, g in mine.items())


def collectives() -> list[Any]:
    mesh = Mesh("dp3")
    group, me = mesh.group("dp"), mesh.rank
    x = torch.arange(7.0) + 100 * me
    gathered = raw.all_gather(x[: me + 1], group, (1, 2, 3))
    top = raw.all_max(x, group)
    raw.broadcast_(x[:0], group, 1)  # no message: the next one is the first
    raw.broadcast_(shared := x.clone(), group, 1)
    raw.all_reduce(torch.zeros(1), group)
    return [raw.all_reduce(x, group), raw.reduce_scatter(x, group, (3, 0, 4)), gathered, top, shared]


def test_every_collective_has_its_value(worlds) -> None:
    for mine, gloo in zip(threads.run(collectives, 3), worlds(3).run(collectives), strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(mine, gloo, strict=True))


def one_raises() -> None:
    mesh = Mesh("dp2")
    if mesh.rank == 1:
        raise ValueError("on rank 1")
    raw.all_reduce(torch.ones(3), mesh.group("dp"))


def test_an_error_is_raised_and_ranks_that_wait_are_told() -> None:
    with pytest.raises(ValueError, match="on rank 1"):
        threads.run(one_raises, 2, timeout=20)


def waits_for_nothing() -> None:
    mesh = Mesh("dp2")
    if mesh.rank:
        raw.receive_start([torch.empty(3)], mesh.group("dp"), 0).wait()
    else:
        raw.receive_start([torch.empty(3)], mesh.group("dp"), 1).wait()


@pytest.mark.medium
def test_a_hang_is_an_error_that_names_the_ranks() -> None:
    with pytest.raises(ig.IsogradError, match=r"IG254(.|\n)*\[0, 1\]"):
        threads.run(waits_for_nothing, 2, timeout=1)


def test_outside_of_ranks_a_thread_is_one_device() -> None:
    threads.run(lambda: None, 2)
    assert threads.member() is None and world.world() == (0, 1)
