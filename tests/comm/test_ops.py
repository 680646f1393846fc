"""Each collective of comm/ops.py equals its naive definition, forward and adjoint, bit for bit, on uneven shapes.

Inputs and cotangents are small integers in fp64, so that every sum is exact and equality is `torch.equal`. The
all_to_all is also looked at in the middle, element by element, with values that spell their own global index: a round
trip that is the identity proves nothing about what lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from isograd.comm import naive, ops
from isograd.comm.group import even_sizes
from isograd.core.mesh import Mesh
from isograd.errors import CommError

MEMBERS = [1, 2, 3, 4]


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def against_naive(
    mine: Callable[[Tensor], Tensor],
    definition: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    one_input: bool,
    one_output: bool,
    index: int,
) -> None:
    """Forward, backward and the adjoint identity. `one_input`, `one_output`: it is one logical tensor (type I)."""
    inputs = [x.clone().requires_grad_() for x in (inputs[:1] if one_input else inputs)]
    outputs = definition(inputs)
    cotangents = [integers(tuple(y.shape), 1000 + i) for i, y in enumerate(outputs)]
    expected = torch.autograd.grad(outputs, inputs, cotangents)

    x = inputs[0 if one_input else index].detach().clone().requires_grad_()
    y = mine(x)
    assert torch.equal(y, outputs[0 if one_output else index])
    y.backward(cotangents[0 if one_output else index])
    assert x.grad is not None
    assert torch.equal(x.grad, expected[0 if one_input else index])

    forward_side = sum(float((y.detach() * c).sum()) for y, c in zip(outputs, cotangents, strict=True))
    adjoint_side = sum(float((x.detach() * g).sum()) for x, g in zip(inputs, expected, strict=True))
    assert forward_side == adjoint_side


def all_pairs_in_a_rank(members: int) -> int:
    """Every op over every dim, even and uneven sizes. Returns how many comparisons it made."""
    mesh = Mesh(f"tp{members}" if members > 1 else "")
    group, me, done = mesh.group("tp"), mesh.index("tp"), 0

    def check(
        mine: Callable[[Tensor], Tensor],
        definition: Callable[[list[Tensor]], list[Tensor]],
        inputs: list[Tensor],
        one_input: bool = False,
        one_output: bool = False,
    ) -> None:
        nonlocal done
        against_naive(mine, definition, inputs, one_input, one_output, me)
        done += 1

    for shape in [(1,), (5,), (4, 3), (3, 2, 5), (40, 700)]:  # the last is above raw.SMALL_BYTES
        same = [integers(shape, i) for i in range(members)]
        check(lambda x: ops.copy_in(x, group), lambda xs: naive.copy_in(xs[0], members), same, one_input=True)
        check(lambda x: ops.all_reduce(x, group), lambda xs: [naive.all_reduce(xs)], same, one_output=True)
        for dim in range(len(shape)):
            for sizes in {even_sizes(shape[dim], members), tuple(range(members)), (2,) * members}:
                parts = [integers((*shape[:dim], n, *shape[dim + 1 :]), i) for i, n in enumerate(sizes)]
                whole = [integers((*shape[:dim], sum(sizes), *shape[dim + 1 :]), i) for i in range(members)]
                check(
                    lambda x, d=dim, s=sizes: ops.all_gather(x, group, d, s),
                    lambda xs, d=dim: naive.all_gather(xs, d),
                    parts,
                )
                check(
                    lambda x, d=dim, s=sizes: ops.gather_for_identical_use(x, group, d, s),
                    lambda xs, d=dim: [naive.gather_for_identical_use(xs, d)],
                    parts,
                    one_output=True,
                )
                check(
                    lambda x, d=dim, s=sizes: ops.reduce_scatter(x, group, d, s),
                    lambda xs, d=dim, s=sizes: naive.reduce_scatter(xs, d, s),
                    whole,
                )
                check(
                    lambda x, d=dim, s=sizes: ops.slice(x, group, d, s),
                    lambda xs, d=dim, s=sizes: naive.slice(xs[0], d, s),
                    whole,
                    one_input=True,
                )
    return done


@pytest.mark.parametrize("members", MEMBERS)
def test_every_collective_equals_its_naive_definition_forward_and_adjoint(worlds, members: int) -> None:
    counts = worlds(members).run(all_pairs_in_a_rank, members)
    assert min(counts) > 100


def spelled(b: int, s: int, h: int, d: int) -> Tensor:
    """Element [b, s, h, d] holds the number whose digits are its indices."""
    digits = [torch.arange(n, dtype=torch.float64) for n in (b, s, h, d)]
    return (
        digits[0][:, None, None, None] * 1e6
        + digits[1][None, :, None, None] * 1e4
        + digits[2][None, None, :, None] * 1e2
        + digits[3][None, None, None, :]
    )


def middle_of_all_to_all(members: int, sequence_first: bool, batch: int, length: int, heads: int) -> None:
    """Sequence shards become head shards: every element of the middle tensor is the one its indices name."""
    mesh = Mesh(f"tp{members}" if members > 1 else "")
    group, me = mesh.group("tp"), mesh.index("tp")
    seq_dim, head_dim = (0, 2) if sequence_first else (1, 2)
    whole = spelled(batch, length, heads, 3)
    whole = whole.transpose(0, 1).contiguous() if sequence_first else whole
    seq_sizes, head_sizes = even_sizes(length, members), even_sizes(heads, members)
    shards = list(whole.split(list(seq_sizes), seq_dim))

    x = shards[me].clone().requires_grad_()
    middle = ops.all_to_all(x, group, head_dim, seq_dim, head_sizes, seq_sizes)
    assert middle.shape == whole.split(list(head_sizes), head_dim)[me].shape
    first_head = sum(head_sizes[:me])
    for index in product(*map(range, middle.shape)):
        outer, inner, head, feature = index
        b, s = (inner, outer) if sequence_first else (outer, inner)
        assert middle[index] == b * 1e6 + s * 1e4 + (first_head + head) * 1e2 + feature
    against_naive(
        lambda t: ops.all_to_all(t, group, head_dim, seq_dim, head_sizes, seq_sizes),
        lambda xs: naive.all_to_all(xs, head_dim, seq_dim, head_sizes),
        [integers(tuple(p.shape), i) for i, p in enumerate(shards)],
        False,
        False,
        me,
    )
    back = ops.all_to_all(middle, group, seq_dim, head_dim, seq_sizes, head_sizes)
    assert torch.equal(back, shards[me])


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("sequence_first", [False, True], ids=["bshd", "sbhd"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("length", "heads"), [(12, 12), (7, 5)], ids=["divides", "uneven"])
def test_all_to_all_moves_every_element_where_its_indices_say(
    worlds, members: int, sequence_first: bool, batch: int, length: int, heads: int
) -> None:
    worlds(members).run(middle_of_all_to_all, members, sequence_first, batch, length, heads)


def counts_of(members: int, kind: str) -> list[list[int]]:
    """How many rows member i sends to member j."""
    if kind == "empty":
        return [[0] * members for _ in range(members)]
    generator = torch.Generator().manual_seed(members)
    counts = torch.randint(0, 6, (members, members), generator=generator)
    if kind == "idle":  # one member sends nothing, and one receives nothing
        counts[0], counts[:, -1] = 0, 0
    found: list[list[int]] = counts.tolist()
    return found


def rows_exchanged(members: int, kind: str) -> None:
    mesh = Mesh(f"tp{members}" if members > 1 else "")
    group, me, counts = mesh.group("tp"), mesh.index("tp"), counts_of(members, kind)
    send, receive = counts[me], [row[me] for row in counts]

    x = torch.tensor([[me, to, row] for to in range(members) for row in range(send[to])]).double().view(-1, 3)
    arrived = ops.exchange_rows(x, group, send, receive)
    expected = [[source, me, row] for source in range(members) for row in range(receive[source])]
    assert arrived.tolist() == expected  # each row spells where it comes from and where it goes
    assert torch.equal(ops.exchange_rows(arrived, group, receive, send), x)
    for width in ((), (3,), (2, 5)):
        inputs = [integers((sum(sent), *width), i) for i, sent in enumerate(counts)]
        against_naive(
            lambda t: ops.exchange_rows(t, group, send, receive),
            lambda xs: naive.exchange_rows(xs, counts),
            inputs,
            False,
            False,
            me,
        )


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("kind", ["uneven", "idle", "empty"])
def test_rows_are_exchanged_in_any_numbers_and_come_back(worlds, members: int, kind: str) -> None:
    worlds(members).run(rows_exchanged, members, kind)


def refusals() -> list[str]:
    mesh = Mesh("tp2")
    group, codes = mesh.group("tp"), []
    for call in (
        lambda: ops.reduce_scatter(torch.zeros(3), group),
        lambda: ops.all_gather(torch.zeros(3), group, 0, (1, 2)),
        lambda: ops.slice(torch.zeros(3), group, 0, (1, 1)),
        lambda: ops.all_to_all(torch.zeros(2, 2), group, 1, -1),
        lambda: ops.exchange_rows(torch.zeros(3), group, (1, 1), (1, 1)),
        lambda: ops.all_reduce(torch.zeros(3), Mesh.unbound("tp2").group("tp")),
    ):
        with pytest.raises(CommError) as error:
            call()
        codes.append(error.value.code)
    return codes


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(worlds) -> None:
    expected = ["IG203", "IG202", "IG202", "IG204", "IG202", "IG201"]
    assert worlds(2).run(refusals) == [expected, expected]
