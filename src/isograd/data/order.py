"""Which sample comes when: pure functions of a number, so that nothing has to be stored, replayed or sent.

`shuffled` is a keyed bijection of range(size): an epoch's order without a list of it. `Blend` says which source the
n-th sample is taken from and how many came from there before. Both cost the same for sample 10**12 as for sample 0,
which is why a run resumes at once, and why ranks under any layout agree without exchanging a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from hashlib import blake2b
from math import gcd, isfinite, isqrt, lcm

from isograd.errors import DataError

ROUNDS = 4
LONGEST = 100_000  # samples until a blend repeats


def shuffled(index: int, size: int, key: bytes) -> int:
    """Where a shuffle of range(size) sends `index`.

    A Feistel network on pairs (a, b) with a < high, b < low: each round adds to one half a hash of the other, which
    can be undone, so all rounds together are a bijection of high * low >= size numbers. What lands outside of
    range(size) is sent on until it lands inside: still a bijection, and rarely needed since high * low - size < high.
    """
    high = isqrt(size - 1) + 1
    low = -(-size // high)
    while True:
        a, b = divmod(index, low)
        for turn in range(ROUNDS):
            a = (a + _hash(key, 2 * turn, b)) % high
            b = (b + _hash(key, 2 * turn + 1, a)) % low
        index = a * low + b
        if index < size:
            return index


def drawn(sample: int, size: int, name: str) -> int:
    """Which of range(size) a sample is. Each epoch goes through all of them once, in an order of its own."""
    epoch, index = divmod(sample, size)
    return shuffled(index, size, blake2b(f"{name} {epoch}".encode(), digest_size=16).digest())


def _hash(key: bytes, turn: int, value: int) -> int:
    return int.from_bytes(blake2b(bytes((turn,)) + value.to_bytes(8, "little"), key=key, digest_size=8).digest())


class Blend:
    """Sources taken in the proportions of their weights, each prefix of the samples within one sample of them.

    Weights are the decimals people write, so their proportions are whole numbers: 0.7, 0.2, 0.1 is 7 : 2 : 1. The
    order repeats after their sum. Inside, the j-th sample of a source with share w may come from place floor(j / w) on
    and must come before place ceil((j + 1) / w); the one that must come first goes first, which always works out.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = _integer_weights(weights)
        self.period = sum(self.parts)
        if self.period > LONGEST:
            share = [max(1, round(part * 10_000 / self.period)) for part in self.parts]
            raise DataError(
                "IG907", seen=list(weights), period=self.period, longest=LONGEST, rounded=", ".join(map(str, share))
            )
        taken = [0] * len(self.parts)
        self.turns: list[tuple[int, int]] = []  # (source, how many it gave before) of each place
        for place in range(self.period):
            ready = (s for s, part in enumerate(self.parts) if taken[s] * self.period < (place + 1) * part)
            source = min(ready, key=lambda s: -(-(taken[s] + 1) * self.period // self.parts[s]))
            self.turns.append((source, taken[source]))
            taken[source] += 1

    def at(self, sample: int) -> tuple[int, int]:
        """(source, how many samples that source gave before)."""
        around, place = divmod(sample, self.period)
        source, before = self.turns[place]
        return source, around * self.parts[source] + before


def _integer_weights(weights: Sequence[float]) -> list[int]:
    wrong = [w for w in weights if isinstance(w, bool) or not isinstance(w, int | float) or not isfinite(w) or w <= 0]
    if wrong or not weights:
        raise DataError(
            "IG906",
            "weights that are no proportions",
            seen=list(weights),
            expected="one number above 0 for each source",
            fix="leave out a source of weight 0",
        )
    exact = [Fraction(str(w)) for w in weights]
    common = lcm(*(f.denominator for f in exact))
    whole = [int(f * common) for f in exact]
    shared = reduce(gcd, whole)
    return [part // shared for part in whole]
