"""Windows and capped scores: attention by blocks of queries, by FlexAttention, and around a ring, is the definition; so
are gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.sequence import attend, band, block, document_starts, naive, token_layout_for, whole
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


@contextmanager
def flex_on_cpus(**compiler: Any) -> Iterator[None]:
    """What cards compute by FlexAttention is computed by its own operators, which take fp64. (torch has them a backward
    on CPUs, and refuses it there, as its kernel for CPUs has none.)"""
    from torch.nn.attention import flex_attention as torchs

    made = torchs.flex_attention, torchs.create_block_mask
    made = tuple(torch.compile(f, **compiler) for f in made) if compiler else made  # type: ignore[assignment]
    with (
        patch.object(torchs, "_validate_device", lambda *_: None), patch.object(block, "_compiled", lambda: made),
        patch.object(block, "flex_takes", lambda _: True), patch.object(block, "_fits_kernel", lambda *_: False),
        patch.object(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not compiler),
    ):  # fmt: skip
        yield


@pytest.mark.parametrize(("window", "packed"), [(None, False), (5, False), (None, True), (5, True)])
def test_flex_attention_with_a_cap_is_the_definition_and_is_compiled_without_a_break(window, packed: bool) -> None:
    """The compiler's own kernels are left out: its graphs run by operators."""
    *qkv, seed = inputs(17)
    groups = documents(17) if packed else None
    starts = None if groups is None else document_starts(groups)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return whole.attention(q, k, v, scale=0.3, window=window, softcap=2.0, starts=starts).transpose(1, 2)

    with flex_on_cpus(backend="aot_eager", fullgraph=True):
        found = gradients(flex, *qkv, seed)
    expected = gradients(lambda q, k, v: naive.attention(q, k, v, groups, 0.3, window, 2.0), *qkv, seed)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["all", "causal", "mask", "a mask for both"])
def test_a_block_of_flex_attention_is_that_of_our_own_lines(kind: str, softcap: float | None) -> None:
    """Its summands of gradients too, by the log-sum-exp over further keys; and some queries see none of its keys."""
    q, k, v, seed = (t.transpose(1, 2) for t in inputs(11))
    rows = 1 if kind == "a mask for both" else 2
    mask = torch.rand(rows, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.4 if "mask" in kind else None
    if mask is not None:
        mask[0, 3:6] = False
    given = 0.3, kind == "causal", mask, softcap
    others = block.forward(q, k + 1, v + 1, 0.3, False)
    with flex_on_cpus():
        found = block.forward(q, k, v, *given)
    own = block.forward(q, k, v, *given)
    block.fold(*others, *own)
    with flex_on_cpus():
        found += tuple(block.backward(seed, q, k, v, *others, *given))
    own += tuple(block.backward(seed, q, k, v, *others, *given))
    for mine, true in zip(found, own, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-12)


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


def on_ranks(layout: str, length: int, cases: list[Any] = CASES, flex: bool = False) -> list[str]:
    """What is wrong on this rank, for all windows."""
    mesh = Mesh(layout)
    places, rank = token_layout_for(length, 2, mesh), mesh.index("cp")
    *qkv, seed = inputs(length)
    wrong = []
    for window, softcap, packed in cases:
        groups = documents(length) if packed else None
        starts = None if groups is None else document_starts(places.pad(groups, -1))
        expected = gradients(lambda q, k, v: naive.attention(q, k, v, groups, None, window, softcap), *qkv, seed)

        def uncut(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return band.attention(q, k, v, window=window, softcap=softcap, starts=starts, size=4).transpose(1, 2)

        def cut(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(uncut, q, k, v, mesh, places, starts, None, window, softcap)

        with flex_on_cpus() if flex else nullcontext():
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


def test_a_ring_of_flex_attention_is_the_definition(worlds) -> None:
    """Also where no query of a block sees any of its keys: nobody waits to know that, and it is computed."""
    cases = [(None, 2.0, False), (4, None, True), (3, 2.0, True)]
    assert worlds(2).run(on_ranks, "cp2 ring", 13, cases, True) == [[], []]


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["cp4 ring", "cp4 ulysses2"])
def test_windows_and_caps_across_four_ranks_are_the_definition(worlds, layout: str) -> None:
    assert worlds(4).run(on_ranks, layout, 29) == [[]] * 4
