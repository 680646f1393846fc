"""Reads coefficients: which pattern are they, over which ranks or micro-batches does it run, and which bug
(docs/bugs.md) is that, by the kind of the tensors that show it?

All coefficients of a right gradient are equal. Each way of being unequal has a usual cause (GRADIENTS.md 5, in
docs/theory.md); a Symptom is the pattern without the tensor's name, so that tensors with one symptom form one finding.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from isograd_verify import tolerances
from isograd_verify.record.events import Key, use_of
from isograd_verify.tell.catalogue import TWICE

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
    """The whole number by which a series goes down, at every step or only at some; 0 when there is none."""
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


_CLASSES = (
    ("adapters", r"lora_|(^|[._])(adapters?|ia3)([._]|$)"),
    ("q/k norms", r"(^|[._])(q|k|query|key|qk)_?(norm|ln|layernorm)"),
    ("gates of shared experts", r"shared_(experts?_)?gate"),
    ("routers", r"router|(^|\.)gate\.(weight|bias)$"),
    ("experts", r"expert"),
    ("norms", r"norm|(^|[._])ln(_|\d|\.|$)"),
    ("keys and values", r"(^|[._])(k|v|kv|key|value|keys|values)(_?proj)?\.(weight|bias)$"),
    ("temperature", r"temperature|logit_scale|logit_bias"),
    ("embeddings", r"embed|(^|\.)(wte|wpe|lm_head|head)\."),
    ("biases", r"bias$"),
)


def class_of(name: str) -> str:
    """Which kind of parameter a name speaks of, for judging a set of them."""
    return next((label for label, pattern in _CLASSES if re.search(pattern, name.lower())), "weights")


def classes_of(names: Iterable[str]) -> str:
    """'norms', 'norms and biases', or 'mixed' when there are more kinds than two."""
    found = sorted({class_of(name) for name in names})
    return " and ".join(found) if len(found) <= 2 else "mixed"


def bug_of(
    symptom: Symptom, names: Collection[str], everything: bool, sizes: Collection[int], of: Collection[str]
) -> str:
    """The id that a pattern over these tensors speaks of; '' when it fits none, or several. `everything`: all that
    could show it do. `sizes`: of groups that were seen. `of`: what the factor may come from (wording.meanings)."""
    kinds = classes_of(names)
    if symptom.kind == UNREDUCED:
        if everything and kinds not in ("norms", "q/k norms", "adapters"):
            return "nosync-missing"
        by_class = {
            "q/k norms": "qknorm-unreduced",
            "adapters": "adapter-unreduced",
            "routers": "router-unreduced",
            "gates of shared experts": "shared-gate",
            "experts": "ep-copies-drift",
            "keys and values": "kv-replica-unreduced",
            "norms": "norm-unreduced",
            "biases and norms": "norm-unreduced",
            "biases": "norm-unreduced",
        }
        return by_class.get(kinds, "")
    if symptom.kind == SCALED:
        return _scaled_bug(symptom.value, kinds, everything, sizes, set(of))
    fixed = {
        LAST_ONLY: "accum-overwritten",
        LOST: "nosync-missing",
        USE_LOST: "shared-module",
        REREDUCED: "accum-rereduced",
        REDIVIDED: "accum-redivided",
        OTHER_CUTS: "tie-after-scatter",
        PER_TOKEN: "mean-of-means",
        CLIPPED: "clip-per-rank",
        CLIPPED_EARLY: "accum-clipped",
        RESTARTED: "positions-restart",
    }
    return fixed.get(symptom.kind, "")


def _scaled_bug(factor: float, kinds: str, everything: bool, sizes: Collection[int], of: set[str]) -> str:
    known = [size**power for size in sizes for power in (1, 2, 3, 4)]
    powers = any(abs(factor - value) <= tolerances.FACTOR * value for value in known)
    of_group = bool(of - {"micro-batches"})
    cases = (  # the first that fits
        (factor == 0 and kinds == "routers", "gather-cut"),
        (factor == 0, "cut-graph"),
        (of == {"micro-batches"} and factor > 1, "accum-undivided"),
        (TWICE in of, "divided-twice"),
        (everything and of_group and "micro-batches" not in of, "ulysses-scale"),
        (everything, ""),
        ("micro-batches" in of and factor < 1, "pp-scale"),
        (kinds == "experts" and of_group, "expert-scale" if factor > 1 else "expert-twice"),
        (kinds == "temperature" and bool(of), "temperature-scale"),
        (kinds == "biases" and of_group and factor > 1, "bias-n-times"),
        (powers, "gather-backward-sum"),
        (of_group and factor < 1, "divided-twice"),
    )
    return next((bug for fits, bug in cases if fits), "")
