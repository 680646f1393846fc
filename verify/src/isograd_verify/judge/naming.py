"""How a symptom gets the id of a bug (docs/bugs.md): by its pattern, and by the kind of the tensors that show it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from isograd_verify import tolerances
from isograd_verify.judge import patterns
from isograd_verify.judge.patterns import Symptom
from isograd_verify.tell.catalogue import TWICE

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
    """The id in the corpus that a pattern over these tensors speaks of; '' when it fits none, or more than one.

    `everything`: all tensors that could show it do. `sizes`: the sizes of the groups that were seen. `of`: what the
    factor may have come from (wording.meanings).
    """
    kinds = classes_of(names)
    if symptom.kind == patterns.UNREDUCED:
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
    if symptom.kind == patterns.SCALED:
        return _scaled(symptom.value, kinds, everything, sizes, set(of))
    fixed = {
        patterns.LAST_ONLY: "accum-overwritten",
        patterns.LOST: "nosync-missing",
        patterns.USE_LOST: "shared-module",
        patterns.REREDUCED: "accum-rereduced",
        patterns.REDIVIDED: "accum-redivided",
        patterns.OTHER_CUTS: "tie-after-scatter",
        patterns.PER_TOKEN: "mean-of-means",
        patterns.CLIPPED: "clip-per-rank",
        patterns.CLIPPED_EARLY: "accum-clipped",
        patterns.RESTARTED: "positions-restart",
    }
    return fixed.get(symptom.kind, "")


def _scaled(factor: float, kinds: str, everything: bool, sizes: Collection[int], of: set[str]) -> str:
    powers = any(
        abs(factor - size**power) <= tolerances.FACTOR * size**power for size in sizes for power in (1, 2, 3, 4)
    )
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
