"""Every method's output and gradients of q, k and v are the one-device definition's; what crosses the wire is known.

Odd lengths, uneven heads, grouped queries, documents and batches; fp64. What is inside an exchange is looked at element
by element: a round trip that is the identity proves nothing about its middle.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from isograd.comm import ops, raw
from isograd.comm.group import even_sizes
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.sequence import (
    attend,
    block,
    document_starts,
    heads_here,
    lay_out_tokens,
    naive,
    ring,
    token_layout_for,
    ulysses,
)
from isograd.sequence.token_layout import visible_keys

LAYOUTS = ["cp2 ulysses", "cp3 ulysses", "cp4 ulysses", "cp2 ring", "cp3 ring", "cp4 ring", "cp4 ulysses2"]
HEADS = {"4/4": (4, 4), "9/3": (9, 3), "8/2": (8, 2)}
DIM = 6


def inputs(heads: tuple[int, int], batch: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, the cotangent of the output, and documents of uneven lengths."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    queries, keys = ((batch, length, h, DIM) for h in heads)
    q, k, v, seed = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (queries, keys, keys, queries))
    documents = (torch.rand(batch, length, generator=generator) < 0.2).long().cumsum(1)
    return q, k, v, seed, documents


def whole(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
    return naive.attention(q, k, v, starts)


def run(layout: str, heads: tuple[int, int], batch: int, length: int, packed: bool) -> dict[str, Tensor]:
    """Output and gradients on this layout, put together from all ranks."""
    mesh = Mesh(layout)
    q, k, v, seed, documents = inputs(heads, batch, length)
    places, rank = token_layout_for(length, batch, mesh), mesh.index("cp")
    starts = document_starts(places.pad(documents, -1)) if packed else None
    local = [places.shard(t, rank).clone().requires_grad_() for t in (q, k, v)]
    y = attend(partial(whole, starts=starts), *local, mesh, places, starts)
    y.backward(places.shard(seed, rank))
    group = mesh.group("cp")
    together = [places.unshard(ops.all_gather(t.detach(), group, 1)) for t in (y, *(x.grad for x in local))]
    return dict(zip(("output", "gradient of q", "gradient of k", "gradient of v"), together, strict=True))


def truth(heads: tuple[int, int], batch: int, length: int, packed: bool) -> dict[str, Tensor]:
    q, k, v, seed, documents = inputs(heads, batch, length)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    y = naive.attention(q, k, v, documents if packed else None)
    y.backward(seed)
    return {"output": y.detach(), "gradient of q": q.grad, "gradient of k": k.grad, "gradient of v": v.grad}


def wrong(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [n for n, t in expected.items() if not float((found[n] - t).norm()) <= 1e-12 * max(float(t.norm()), 1.0)]


SHAPES = [(batch, length) for batch in (1, 3) for length in (1, 13, 37)]


def run_shapes(layout: str, heads: tuple[int, int], packed: bool) -> list[dict[str, Tensor]]:
    return [run(layout, heads, batch, length, packed) for batch, length in SHAPES]


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_is_one_devices(worlds, layout: str, heads: str, packed: bool) -> None:
    results = worlds(Layout.parse(layout).world_size).run(run_shapes, layout, HEADS[heads], packed)
    for number, shape in enumerate(SHAPES):
        expected = truth(HEADS[heads], *shape, packed)
        for rank, found in enumerate(results):
            assert not wrong(found[number], expected), f"batch, length {shape} on rank {rank}"


def run_ring_contiguous() -> dict[str, Tensor]:
    mesh = Mesh("cp3 ring")
    q, k, v, seed, _ = inputs((4, 2), 2, 17)
    places, rank = lay_out_tokens(17, ring=3, order="contiguous"), mesh.index("cp")
    local = [places.shard(t, rank).transpose(1, 2).clone().requires_grad_() for t in (q, k, v)]
    y = ring.attention(*local, mesh.group("cp"), places).transpose(1, 2)
    y.backward(places.shard(seed, rank))
    group = mesh.group("cp")
    parts = [y.detach(), *(x.grad.transpose(1, 2) for x in local)]
    together = [places.unshard(ops.all_gather(t, group, 1)) for t in parts]
    return dict(zip(("output", "gradient of q", "gradient of k", "gradient of v"), together, strict=True))


def test_a_ring_works_in_contiguous_order_too(worlds) -> None:
    expected = truth((4, 2), 2, 17, False)
    assert not [wrong(found, expected) for found in worlds(3).run(run_ring_contiguous) if wrong(found, expected)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_torchs_kernel_and_our_own_lines_are_the_same_block(heads: str, causal: bool, monkeypatch) -> None:
    q, k, v, seed, _ = inputs(HEADS[heads], 2, 11)
    q, k, v, seed = (t.transpose(1, 2) for t in (q, k, v, seed))
    results = []
    for fits in (True, False):
        monkeypatch.setattr(block, "_fits_kernel", lambda *_, fits=fits: fits)
        out, log_sum = block.forward(q, k, v, 0.3, causal)
        results.append((out, log_sum, *block.backward(seed, q, k, v, out, log_sum, 0.3, causal)))
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).norm()) <= 1e-13 * float(theirs.norm())


# -- the middle of the exchange ----------------------------------------------------------------------------------


def middle(heads: tuple[int, int], layout_of_dims: str) -> tuple[Tensor, Tensor, Tensor]:
    """Index-coded q, k, v as this rank's attention function gets them: letter, head, place and row are its digits."""
    mesh = Mesh("cp3 ulysses")
    places, rank, seen = lay_out_tokens(12, ulysses=3), mesh.index("cp"), []

    def coded(count: int, letter: int) -> Tensor:
        head = torch.arange(count)[None, None, :, None]
        place = torch.arange(12)[None, :, None, None]
        row = torch.arange(2)[:, None, None, None]
        code = (letter * 100_000 + head * 1000 + place * 10 + row).expand(2, 12, count, 4).double()
        return places.shard(code, rank)

    def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend(t.clone() for t in (q, k, v))
        return q

    parts = [coded(heads[0], 1), coded(heads[1], 2), coded(heads[1], 3)]
    order = ["bshd".index(name) for name in layout_of_dims]
    back = ulysses.attention(look, *(t.permute(order) for t in parts), mesh.group("cp"), layout_of_dims)
    assert torch.equal(back, parts[0].permute(order))
    return tuple(t.permute([layout_of_dims.index(name) for name in "bshd"]) for t in seen)  # type: ignore[return-value]


@pytest.mark.parametrize("layout_of_dims", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 2), (3, 1), (7, 7)], ids=str)
def test_each_element_of_the_middle_is_where_it_should_be(worlds, heads: tuple[int, int], layout_of_dims: str) -> None:
    """Rank r has the next heads / 3 query heads over all places in order, and with each its own key and value head."""
    first, share = 0, heads[0] // heads[1]
    for rank, (q, k, v) in enumerate(worlds(3).run(middle, heads, layout_of_dims)):
        count = even_sizes(heads[0], 3)[rank]
        assert q.shape == (2, 12, count, 4)
        run_of = count // k.shape[2]
        for row in range(2):
            for place in range(12):
                for h in range(count):
                    code = 10 * place + row
                    key = (first + h) // share
                    assert (q[row, place, h] == 100_000 + 1000 * (first + h) + code).all()
                    assert (k[row, place, h // run_of] == 200_000 + 1000 * key + code).all()
                    assert (v[row, place, h // run_of] == 300_000 + 1000 * key + code).all()
        first += count


# -- bytes, and work -----------------------------------------------------------------------------------------------


def traffic(layout: str, heads: tuple[int, int], length: int) -> tuple[int, int, int, int]:
    """(elements this rank sends in forward, in backward, block computations in forward, in backward)."""
    mesh = Mesh(layout)
    q, k, v, seed, _ = inputs(heads, 2, length)
    places, rank, sent, calls = token_layout_for(length, 2, mesh), mesh.index("cp"), [], []
    local = [places.shard(t, rank).clone().requires_grad_() for t in (q, k, v)]
    originals = raw.exchange, block.forward, block.backward

    def counting(out, into, group, **more):
        sent.append(sum(t.numel() for i, pieces in enumerate(out) for t in pieces if i != group.index))
        return originals[0](out, into, group, **more)

    def counted(which: int):
        return lambda *a: calls.append(which) or originals[which](*a)

    raw.exchange, block.forward, block.backward = counting, counted(1), counted(2)
    try:
        y = attend(partial(whole, starts=None), *local, mesh, places)
        forward = sum(sent)
        y.backward(places.shard(seed, rank))
    finally:
        raw.exchange, block.forward, block.backward = originals
    return forward, sum(sent) - forward, calls.count(1), calls.count(2)


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_ulysses_sends_each_head_once_to_each_rank_that_needs_it(worlds, cp: int, heads: str) -> None:
    """A lower bound by counting: what rank j attends with and rank i holds crosses once, and the output comes back."""
    queries, keys = HEADS[heads]
    per_head = 2 * (24 // cp) * DIM  # batch 2
    first = 0
    needed = []  # heads of q, k and v that each rank attends with
    for count in even_sizes(queries, cp):
        needed.append(count + 2 * len({h // (queries // keys) for h in range(first, first + count)}))
        first += count
    for rank, (forward, backward, *_) in enumerate(worlds(cp).run(traffic, f"cp{cp} ulysses", HEADS[heads], 24)):
        there = sum(n for other, n in enumerate(needed) if other != rank)
        back = (cp - 1) * even_sizes(queries, cp)[rank]
        assert forward == (there + back) * per_head
        other_way = (cp - 1) * needed[rank] + queries - even_sizes(queries, cp)[rank]
        assert backward == other_way * per_head


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_a_ring_sends_only_keys_that_are_seen_and_skips_what_is_not(worlds, cp: int, heads: str) -> None:
    """Forward: keys and values of mine that member i sees. Backward: the same again, and their gradients home."""
    keys, length = HEADS[heads][1], 24
    blocks = lay_out_tokens(length, ring=cp).blocks
    total = 0
    for rank, found in enumerate(worlds(cp).run(traffic, f"cp{cp} ring", HEADS[heads], length)):
        seen = sum(visible_keys(blocks[i], blocks[rank]) for i in range(cp) if i != rank)
        home = sum(visible_keys(blocks[rank], blocks[i]) for i in range(cp) if i != rank)
        per_key = 2 * 2 * keys * DIM  # batch 2, k and v
        assert found == (seen * per_key, (seen + home) * per_key, cp, cp)
        total += seen
    passing_whole_blocks = cp * (cp - 1) * (length // cp)
    assert total * 4 == passing_whole_blocks * 3


def test_a_contiguous_ring_skips_blocks_that_lie_ahead(worlds) -> None:
    blocks = lay_out_tokens(24, ring=4, order="contiguous").blocks
    assert [[visible_keys(mine, other) for other in blocks] for mine in blocks] == [
        [6, 0, 0, 0], [6, 6, 0, 0], [6, 6, 6, 0], [6, 6, 6, 6]
    ]  # fmt: skip


# -- refusals ------------------------------------------------------------------------------------------------------


def test_fewer_heads_than_ulysses_ranks_are_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError, match="IG407") as error:
        ulysses.assign_heads(2, 2, 3)
    assert "cpN ulyssesM" in str(error.value)
    assert heads_here(9, 3, Mesh.unbound("cp4 ulysses2", rank=3)) == (5, 9)


def refused_inside() -> list[str]:
    group, q = Mesh("cp2 ulysses").group("cp"), torch.zeros(1, 3, 4, 2)
    codes = []
    for call in (
        lambda: ulysses.attention(lambda q, k, v: q, q, q, q, group, "hsbd"),
        lambda: ulysses.attention(lambda q, k, v: q.transpose(1, 2), q, q, q, group),
    ):
        with pytest.raises(ModelError) as error:
            call()
        codes.append(error.value.code)
    return codes


def test_an_unknown_order_of_dimensions_and_a_misshapen_output_are_refused(worlds) -> None:
    assert worlds(2).run(refused_inside) == [["IG431", "IG432"]] * 2
