"""comm/raw.py: members of a group obtain the same bits; native paths, as NCCL takes them, give the same values."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext

import pytest
import torch

from isograd.comm import raw, threads
from isograd.comm.group import even_sizes
from isograd.comm.transport import Transport
from isograd.comm.world import new_group, world
from isograd.core.mesh import Mesh
from tests.native import native_transports


def sums_on(axes_layout: str, numel: int, native: bool) -> list[torch.Tensor]:
    with native_transports() if native else nullcontext():
        mesh = Mesh(axes_layout)
        group = mesh.group("world")
        x = torch.randn(numel, generator=torch.Generator().manual_seed(mesh.rank))
        sizes = even_sizes(numel, group.size)
        summed = raw.all_reduce(x, group)
        scattered = raw.all_gather(raw.reduce_scatter(x, group, sizes), group, sizes)
        return [summed, scattered, raw.all_max(x, group), torch.stack(raw.gather_list(x, group))]


@pytest.mark.medium
@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 12, 1000, 50_000])
@pytest.mark.parametrize("native", [False, True])
def test_reductions_give_every_member_the_same_bits_and_the_true_sum(worlds, members, numel, native) -> None:
    results = worlds(members).run(sums_on, f"dp{members}", numel, native)
    inputs = torch.stack([torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(members)])
    for mine in results:
        for tensor, first in zip(mine, results[0], strict=True):
            assert torch.equal(tensor, first)
    summed, scattered, top, gathered = results[0]
    noise = members * torch.finfo(torch.float32).eps * inputs.double().abs().sum(0)
    assert ((summed - inputs.double().sum(0)).abs() <= noise).all()
    assert ((scattered - inputs.double().sum(0)).abs() <= noise).all()
    assert torch.equal(top, inputs.amax(0))
    assert torch.equal(gathered, inputs)


def gathered_in_rounds(shape: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Gathered; what it gathered; how many messages this rank has sent for it."""
    mesh = Mesh(f"dp{world()[1]}")
    group = mesh.group("world", "step")
    assert isinstance(group.transport, Transport)
    before = sum(count for (sends, *_), count in group.transport.counts.items() if sends)
    found = raw.gather_list(torch.full(shape, mesh.rank), group)
    sent = sum(count for (sends, *_), count in group.transport.counts.items() if sends) - before
    return found, [torch.full(shape, rank) for rank in range(group.size)], sent


@pytest.mark.parametrize("ranks", [8, 9, 16, 21, 33])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_a_gather_of_many_members_is_a_message_each_for_twice_as_many(ranks, shape) -> None:
    for found, expected, sent in threads.run(gathered_in_rounds, ranks, shape, timeout=60):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert sent == (ranks - 1 if ranks <= raw.MANY else math.ceil(math.log2(ranks)))


def one_of_many_raises() -> None:
    mesh = Mesh("dp12")
    if mesh.rank == 7:
        raise ValueError("on rank 7")
    raw.gather_list(torch.ones(3), mesh.group("world", "step"))


def test_many_members_are_told_of_one_that_has_left() -> None:
    with pytest.raises(ValueError, match="on rank 7"):
        threads.run(one_of_many_raises, 12, timeout=20)


def sum_over_overlapping_groups() -> list[float]:
    """Rank 2 is in all of them, the others in some: when they meet they have made different numbers of groups."""
    rank = int(os.environ["RANK"])
    found = []
    for ranks in ((0, 2), (1, 2), (0, 2, 3), (1, 2, 3)):
        if rank in ranks:
            group = new_group("some", ranks, rank)
            found.append(float(raw.all_reduce(torch.tensor(10.0**rank), group)))
    return found


def test_members_that_have_made_different_numbers_of_groups_meet(worlds) -> None:
    assert worlds(4).run(sum_over_overlapping_groups) == [
        [101.0, 1101.0],
        [110.0, 1110.0],
        [101.0, 110.0, 1101.0, 1110.0],
        [1101.0, 1110.0],
    ]
