"""Windows and capped scores: attention by blocks of queries, and around a ring, is the definition; so are gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.sequence import attend, band, document_starts, naive, token_layout_for
from isograd.sequence.band import pieces
from isograd.sequence.token_layout import block_masks, lay_out_tokens, positions_of, visible_keys


def inputs(length: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    made = [
        torch.randn(2, length, h, 6, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    return [3 * made[0], *made[1:]]  # scores large enough for a cap to show


def documents(length: int) -> Tensor:
    found = torch.zeros(2, length, dtype=torch.long)
    found[0, 3:], found[0, 9:], found[1, 5:] = 7, 2, 1
    return found


def gradients(attention: object, q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves)  # type: ignore[operator]
    out.backward(seed)
    return [out.detach(), *(t.grad for t in leaves)]  # type: ignore[list-item]


CASES = list(product((1, 3, 4, 7, 40, None), (None, 2.0), (False, True)))


@pytest.mark.parametrize(("window", "softcap", "packed"), CASES)
@pytest.mark.parametrize(("length", "size"), [(17, 4), (12, 5), (9, 128)])
def test_attention_by_blocks_of_queries_is_the_definition(window, softcap, packed, length: int, size: int) -> None:
    *qkv, seed = inputs(length)
    groups = documents(length) if packed else None
    starts = None if groups is None else document_starts(groups)

    def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        found = band.attention(q, k, v, scale=0.3, window=window, softcap=softcap, starts=starts, size=size)
        return found.transpose(1, 2)

    def defined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return naive.attention(q, k, v, groups, 0.3, window, softcap)

    for mine, expected in zip(gradients(by_blocks, *qkv, seed), gradients(defined, *qkv, seed), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_blocks_outside_the_band_are_not_computed() -> None:
    for start in range(0, 4096, 128):
        read = sum(piece.last - piece.first for piece in pieces(start, start + 128, 256))
        assert read == min(start + 128, 128 + 255)


@pytest.mark.parametrize(("ring", "length", "window"), [(2, 16, 3), (4, 32, 5), (4, 32, 14), (3, 25, 1)])
def test_a_ring_sends_no_keys_that_no_query_sees_through_the_window(ring: int, length: int, window: int) -> None:
    places = lay_out_tokens(length, ring=ring)
    for mine, theirs in product(range(ring), range(ring)):
        queries, keys = positions_of(places.blocks[mine]), positions_of(places.blocks[theirs])
        seen = (keys <= queries[:, None]) & (keys > queries[:, None] - window)
        blocks = places.blocks[mine], places.blocks[theirs]
        covered = torch.zeros_like(seen)
        for sight in block_masks(*blocks, window):
            part = seen[sight.start : sight.stop]
            covered[sight.start : sight.stop, : sight.keys] = True
            assert part.any() or mine == theirs
        assert not (seen & ~covered).any()
        assert (visible_keys(*blocks, window) > 0) == bool(seen.any())


def on_ranks(layout: str, length: int) -> list[str]:
    """What is wrong on this rank, for all windows."""
    mesh = Mesh(layout)
    places, rank = token_layout_for(length, 2, mesh), mesh.index("cp")
    *qkv, seed = inputs(length)
    wrong = []
    for window, softcap, packed in CASES:
        groups = documents(length) if packed else None
        starts = None if groups is None else document_starts(places.pad(groups, -1))
        expected = gradients(lambda q, k, v: naive.attention(q, k, v, groups, None, window, softcap), *qkv, seed)

        def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return band.attention(q, k, v, window=window, softcap=softcap, starts=starts, size=4).transpose(1, 2)

        def cut(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(whole, q, k, v, mesh, places, starts, None, window, softcap)

        found = gradients(cut, *(places.shard(t, rank) for t in (*qkv, seed)))
        for name, mine, whole_one in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            real = places.shard(torch.ones(2, length, 1, 1, dtype=torch.bool), rank)  # not padding
            error = float(((mine - places.shard(whole_one, rank)) * real).abs().max())
            if not error <= 1e-12:
                wrong.append(f"{layout} window {window} cap {softcap} packed {packed}: {name} by {error:.1e}")
    return wrong


@pytest.mark.parametrize("layout", ["cp2 ring", "cp2 ulysses"])
def test_windows_and_caps_across_ranks_are_the_definition(worlds, layout: str) -> None:
    for length in (16, 13):
        assert worlds(2).run(on_ranks, layout, length) == [[], []]


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["cp4 ring", "cp4 ulysses2"])
def test_windows_and_caps_across_four_ranks_are_the_definition(worlds, layout: str) -> None:
    assert worlds(4).run(on_ranks, layout, 29) == [[]] * 4
