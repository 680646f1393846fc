"""Reads coefficients: which pattern are they, and over which ranks or micro-batches does it run?

All coefficients of a right gradient are equal. Each way of being unequal has a usual cause (GRADIENTS.md 5, in
docs/theory.md); a Symptom is the pattern without the tensor's name, so that tensors with one symptom form one finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from isograd_verify import tolerances
from isograd_verify.record.events import Key, use_of

SCALED, UNREDUCED, OTHER_CUTS, LAST_ONLY, LOST, USE_LOST, REREDUCED = (
    "scaled", "unreduced", "other cuts", "last micro-batch only", "micro-batches lost", "a use lost", "reduced again",
)  # fmt: skip
REDIVIDED, PER_TOKEN, CLIPPED, CLIPPED_EARLY, MIXED, RESTARTED, SHARDS = (
    "divided again", "mean of means", "clipped apart", "clipped early", "mixed", "restarted", "other shards",
)  # fmt: skip


@dataclass(frozen=True)
class Symptom:
    """A pattern of coefficients, without the name of the tensor that shows it."""

    kind: str
    value: float = 1.0  # the factor of SCALED, the base of REREDUCED and REDIVIDED
    missing: tuple[int, ...] = ()  # ranks (UNREDUCED, OTHER_CUTS) or micro-batches (LOST) that do not count
    own: int = 0  # the rank whose gradient was read


def said(kind: str, value: float, axis: str) -> str:
    """What is said of a pattern over an axis; '' of one that has no sentence."""
    return {
        UNREDUCED: f"not summed over {axis}: each rank holds its own part only",
        OTHER_CUTS: f"summed over {axis} from parts that are cut differently: what some ranks added is missing, and "
        "what others added counts twice",
        LAST_ONLY: "only the last micro-batch counts, earlier ones are lost",
        LOST: "some micro-batches were never reduced over the ranks",
        USE_LOST: "only the first use of a module in a backward was reduced over the ranks",
        REREDUCED: f"earlier micro-batches were reduced again: coefficients rise by {value:g} each",
        REDIVIDED: f"earlier micro-batches were divided by {value:g} again, later ones were not",
        CLIPPED: "each rank clips by a norm of its own before the sum",
        CLIPPED_EARLY: "they were clipped before the last micro-batch was added: those before it count less",
        PER_TOKEN: "contributions are weighted by 1 / their own number of labels",
        SHARDS: f"summed over {axis}, whose members hold other shards of it",
        MIXED: "contributions count unequally",
    }.get(kind, "")


def read(
    q: dict[Key, float], own: int, counts: dict[Key, float] | None = None, tolerance: float = tolerances.FACTOR
) -> Symptom:
    """`q`: each contribution's coefficient relative to what it should be; `counts`: labels behind each, if known."""
    top = max((abs(v) for v in q.values()), default=0.0)
    if top == 0:
        return Symptom(SCALED, 0.0)

    def equal(a: float, b: float) -> bool:
        return abs(a - b) <= tolerance * top

    values = list(q.values())
    if all(equal(v, values[0]) for v in values):
        return Symptom(SCALED, values[0])
    ranks, micros = sorted({k for k, _ in q}), sorted({m for _, m in q})
    if counts and _follows_counts(q, counts, tolerance):
        return Symptom(PER_TOKEN)
    by_micro = {m: [v for (_, j), v in q.items() if j == m] for m in micros}
    by_rank = {k: [v for (r, _), v in q.items() if r == k] for k in ranks}
    if len(micros) > 1 and all(equal(v, vs[0]) for vs in by_micro.values() for v in vs):
        return _over_micros({m: vs[0] for m, vs in by_micro.items()}, tolerance * top)
    gone = tuple(k for k in ranks if all(equal(v, 0) for v in by_rank[k]))
    here = tuple(k for k in ranks if k not in gone)
    if gone and own in here:
        inner = [v for k in here for v in by_rank[k]]
        if all(equal(v, inner[0]) for v in inner):
            return Symptom(UNREDUCED, inner[0], gone, own)
        return Symptom(OTHER_CUTS if _one_for_another(values, tolerance * top) else UNREDUCED, 0.0, gone, own)
    own_whole = by_rank.get(own, [])
    lost = tuple(m for m in micros if all(equal(v, 0) for (r, j), v in q.items() if j == m and r != own))
    if own_whole and all(not equal(v, 0) for v in own_whole) and lost and len(lost) < len(micros):
        # Each rank kept its own, but only some micro-batches, or some uses of a module, were reduced.
        return Symptom(USE_LOST if use_of(min(lost)) else LOST, 1.0, lost)
    return Symptom(MIXED)


def _one_for_another(values: list[float], small: float) -> bool:
    """1, 0, 1, 2: for each that is missing, another one counts twice."""
    once = min(v for v in values if abs(v) > small)
    missing = [v for v in values if abs(v) <= small]
    twice = [v for v in values if abs(v - 2 * once) <= small]
    others = [v for v in values if abs(v - once) <= small]
    return len(missing) == len(twice) and len(missing) + len(twice) + len(others) == len(values)


def _over_micros(values: dict[int, float], small: float) -> Symptom:
    micros = sorted(values)
    series = [values[m] for m in micros]
    gone = tuple(m for m in micros if abs(values[m]) <= small)
    if gone == tuple(micros[:-1]):
        return Symptom(LAST_ONLY, series[-1], gone)
    if gone:
        return Symptom(LOST, 1.0, gone)
    if base := _base([a / b for a, b in pairwise(series)]):
        return Symptom(REREDUCED, float(base))
    if base := _base([b / a for a, b in pairwise(series)]):
        return Symptom(REDIVIDED, float(base))
    return Symptom(MIXED)


def _base(steps: list[float]) -> int:
    """The whole number by which a series goes down, at every step or only at some (several micro-batches for each call
    of a pipeline's schedule); 0 when there is none."""
    base = round(max(steps))
    fits = base >= 2 and all(min(abs(s - base) / base, abs(s - 1)) <= tolerances.BASE for s in steps)
    return base if fits else 0


def _follows_counts(q: dict[Key, float], counts: dict[Key, float], tolerance: float) -> bool:
    """Whether coefficient x count is constant while the coefficients are not."""
    products = [v * counts[k] for k, v in q.items() if counts.get(k)]
    if len(products) < 2 or len({round(counts[k], 6) for k in q if counts.get(k)}) < 2:
        return False
    top = max(map(abs, products))
    return all(abs(p - products[0]) <= tolerances.LOOSE * tolerance * top for p in products)
