"""Where tokens live: every token once, equal parts, balanced work, nothing lost at a border."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isograd.errors import ModelError
from isograd.sequence.token_layout import (
    TokenLayout,
    block_masks,
    document_starts,
    lay_out_tokens,
    positions_of,
    visible_keys,
)


@st.composite
def any_places(draw: st.DrawFn) -> TokenLayout:
    return lay_out_tokens(
        draw(st.integers(1, 70)), ulysses=draw(st.integers(1, 4)), ring=draw(st.integers(1, 5)),
        order=draw(st.sampled_from(["zigzag", "contiguous"])), rows=draw(st.integers(1, 3)),
        multiple=draw(st.integers(1, 4)),
    )  # fmt: skip


@given(any_places())
def test_every_position_is_held_once_in_equal_parts(places: TokenLayout) -> None:
    held = [places.positions(rank) for rank in range(places.cp)]
    assert {len(part) for part in held} == {places.local}
    assert sorted(torch.cat(held).tolist()) == list(range(places.padded))
    for member in range(places.ring):
        parts = held[member * places.ulysses : (member + 1) * places.ulysses]
        block = positions_of(places.blocks[member])
        assert torch.equal(torch.cat(parts), block)
        assert torch.equal(block, block.sort().values)


@given(any_places(), st.integers(1, 3))
def test_parts_put_together_are_the_sequences(places: TokenLayout, rows: int) -> None:
    x = torch.arange(rows * places.length * 2).view(rows, places.length, 2) + 1
    parts = [places.shard(x, rank, -1) for rank in range(places.cp)]
    assert torch.equal(places.unshard(torch.cat(parts, 1)), x)
    padded = places.pad(x, -1)
    for rank, part in enumerate(parts):
        assert torch.equal(part, padded[:, places.positions(rank)])
    assert int((torch.cat(parts, 1) == -1).all(-1).sum()) == rows * (places.padded - places.length)


def test_labels_shifted_by_the_caller_lose_no_target_at_a_border() -> None:
    places, tokens = lay_out_tokens(11, ring=3), torch.arange(12)[None]
    pairs = set()
    for rank in range(3):
        pairs |= set(zip(places.shard(tokens[:, :-1], rank, -1)[0].tolist(),
                         places.shard(tokens[:, 1:], rank, -100)[0].tolist(), strict=True))  # fmt: skip
    assert pairs - {(-1, -100)} == {(i, i + 1) for i in range(11)}


@pytest.mark.parametrize(
    ("ulysses", "ring", "order", "expected"),
    [
        (4, 1, "zigzag", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        (1, 4, "zigzag", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (2, 2, "zigzag", [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (1, 4, "contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
    ],
)
def test_the_docstrings_table(ulysses: int, ring: int, order: str, expected: list[list[int]]) -> None:
    places = lay_out_tokens(16, ulysses=ulysses, ring=ring, order=order)
    assert [places.positions(rank).tolist() for rank in range(4)] == expected


@settings(deadline=None)
@given(any_places())
def test_sights_are_the_causal_mask(places: TokenLayout) -> None:
    """Written out for every pair of blocks: seen pairs are covered once, unseen ones never."""
    for mine in range(places.ring):
        for theirs in range(places.ring):
            rows, keys = positions_of(places.blocks[mine]), positions_of(places.blocks[theirs])
            seen = torch.zeros(len(rows), len(keys), dtype=torch.long)
            found = block_masks(places.blocks[mine], places.blocks[theirs])
            for sight in found:
                ones = torch.ones(sight.stop - sight.start, sight.keys, dtype=torch.long)
                seen[sight.start : sight.stop, : sight.keys] += ones.tril() if sight.causal else ones
            assert torch.equal(seen.bool(), rows[:, None] >= keys)
            assert seen.max() <= 1
            assert len(found) <= 1
            columns = (rows[:, None] >= keys).any(0).nonzero()
            assert visible_keys(places.blocks[mine], places.blocks[theirs]) == (
                int(columns.max()) + 1 if len(columns) else 0
            )


@pytest.mark.parametrize("ring", [2, 3, 4, 5])
def test_zigzag_gives_every_member_the_same_work_in_every_step(ring: int) -> None:
    blocks = lay_out_tokens(24 * ring, ring=ring).blocks
    for step in range(1, ring):
        areas = [
            sum((s.stop - s.start) * s.keys for s in block_masks(blocks[i], blocks[(i - step) % ring]))
            for i in range(ring)
        ]
        assert len(set(areas)) == 1
        assert areas[0] == 24 * 24 // 2


def test_a_document_begins_where_the_number_changes() -> None:
    documents = torch.tensor([[4, 4, 1, 1, 1, 4], [0, 0, 0, 0, 0, 0]])
    assert document_starts(documents).tolist() == [[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0]]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ModelError, match="IG430"):
        lay_out_tokens(8, ring=2, order="zigzig")
