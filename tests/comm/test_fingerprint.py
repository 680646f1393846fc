"""The fingerprint of a tensor changes with anything that changes in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isograd.comm.fingerprint import fingerprint

KINDS = (torch.uint8, torch.bool, torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.complex128)


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(3, 5, dtype=dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_equal_tensors_have_one_fingerprint_and_one_element_changes_it(dtype: torch.dtype) -> None:
    first, other = ones(dtype), ones(dtype)
    assert fingerprint(first).dtype == torch.int64
    assert torch.equal(fingerprint(first), fingerprint(other.t().contiguous().t())), "memory format does not matter"
    assert torch.equal(fingerprint(first[1:, 1]), fingerprint(first[1:, 1].clone())), "nor where it lies"
    other[2, 3] = 0
    assert not torch.equal(fingerprint(first), fingerprint(other))


def test_the_last_bit_place_and_shape_count() -> None:
    x = torch.arange(12.0, dtype=torch.float64)
    nudged = x.clone()
    nudged[7] = torch.nextafter(nudged[7], torch.tensor(100.0).double())
    others = [nudged, x.flip(0), x.view(3, 4), x.view(4, 3), x[:11], torch.zeros(0), torch.zeros(1), torch.zeros(2)]
    prints = [int(fingerprint(t)) for t in (x, *others)]
    assert len(set(prints)) == len(prints)


def flipped(bit: int, *places: int) -> Callable[[Tensor], None]:
    """One bit of the 8-byte words at these places, counted from the first or the last one."""

    def change(x: Tensor) -> None:
        words = x.view(-1).view(torch.int64)
        for place in places:
            words[place] ^= 1 << bit if bit < 63 else -(1 << 63)

    return change


def moved(x: Tensor, size: int) -> None:
    """2^k more in one word of `size` bytes, and 2^k less in another one."""
    words = x.view(-1).view({4: torch.int32, 8: torch.int64}[size])
    words[3] += 1 << 20
    words[-4] -= 1 << 20


PATTERNS: dict[str, Callable[[Tensor], object]] = {
    "two rows exchanged": lambda x: x.copy_(x[[0, 5, *range(2, 5), 1, *range(6, len(x))]]),
    "rows shifted by one": lambda x: x.copy_(x.roll(1, 0)),
    "the first and the last row exchanged": lambda x: x.copy_(x[[-1, *range(1, len(x) - 1), 0]]),
    "rows in reverse": lambda x: x.copy_(x.flip(0)),
    "two neighbours exchanged": lambda x: x.view(-1)[:2].copy_(x.view(-1)[:2].flip(0).clone()),
    "a 4-byte word more, one less": lambda x: moved(x, 4),
    "an 8-byte word more, one less": lambda x: moved(x, 8),
    **{f"bit {bit} of one word": flipped(bit, 4) for bit in (0, 15, 31, 32, 62, 63)},
    **{f"bit {bit} of two words": flipped(bit, 4, -6) for bit in range(64)},
    **{f"bit {bit} of two neighbours": flipped(bit, 4, 5) for bit in (0, 31, 32, 62, 63)},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_a_plain_sum_of_words_does_not_see_is_seen(dtype: torch.dtype) -> None:
    """FAILURES E12: seals and copies were checked by a plain sum. What checks ranks saw no sign of half of fp64."""
    x = torch.randn(80, 1026, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert x.numel() * x.itemsize // 4 > 2**15
    before, missed = fingerprint(x), []
    for name, change in PATTERNS.items():
        changed = x.clone()
        change(changed)
        assert not torch.equal(changed.view(torch.int8), x.view(torch.int8)), name
        missed += [name] if torch.equal(fingerprint(changed), before) else []
    assert not missed


def test_words_at_the_same_place_of_two_chunks_are_told_apart() -> None:
    x = torch.arange(3 << 16, dtype=torch.int32)
    changed = x.view(3, -1)[[1, 0, 2]].view(-1)
    assert not torch.equal(fingerprint(changed), fingerprint(x))
    twice = x.view(3, -1)[[0, 0, 2]].view(-1)
    assert len({int(fingerprint(t)) for t in (x, changed, twice)}) == 3


def test_bytes_that_fill_no_word_count_in_their_places() -> None:
    cases = [9, 0, 0, 0, 1, 2, 3], [9, 0, 0, 0, 3, 2, 1], [1, 0, 0, 0, 9, 2, 3], [9, 0, 0, 0, 1, 2, 4]
    assert len({int(fingerprint(torch.tensor(case, dtype=torch.uint8))) for case in cases}) == 4
