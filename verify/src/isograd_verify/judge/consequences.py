"""What follows from what: a bug is told, and what it causes is not told beside it.

A comparison shows more differences than watching does: what a cut graph leaves behind looks like a sum that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding

DRIFT = frozenset({"replicas-differ"})
UNREDUCED = frozenset({
    "nosync-missing", "norm-unreduced", "qknorm-unreduced", "kv-replica-unreduced", "router-unreduced", "wrong-group",
    "adapter-unreduced", "shared-gate", "ep-copies-drift", "outside-wrapper", "tie-unreduced",
})  # fmt: skip
ADJOINTS = frozenset({"wrong-adjoint", "input-unreduced"})
# "": a symptom that fits no known bug.
LATER_STEPS = (
    frozenset({"", "order", "clip-per-rank", "norm-counts-replicas", "non-finite", "cut-graph"}) | DRIFT | UNREDUCED
)
NO_PATTERN = frozenset({"", "norm-unreduced", "nosync-missing", "outside-wrapper"}) | DRIFT

SPOILING = (
    "bias-n-times", "bias-twice", "ulysses-permute", "border-labels-lost", "positions-restart", "wrong-adjoint",
    "bf16-accumulation", "parameters-mixed",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a bug causes, and what a comparison makes of it."""

    hides: frozenset[str] = DRIFT  # of the findings in the same program
    spoils: frozenset[str] = frozenset()  # of the findings of a comparison: gradients differ in no pattern of their own
    on_purpose: bool = False  # some programs do so on purpose: gradients equal to the reference's clear it
    its_tensors: frozenset[str] = frozenset()  # of what is found of its own tensors, what follows from it; "*": all
    factor_only: bool = False  # it explains a factor between gradients, and no other difference
    knows_line: bool = False  # the check without a reference knows the line of the program, comparing does not


CONSEQUENCES: dict[str, Row] = {
    "overflow-alone": Row(hides=LATER_STEPS),
    "resume-other-rank": Row(hides=LATER_STEPS, spoils=NO_PATTERN),
    "cache-rng": Row(hides=LATER_STEPS),
    "norm-dropout-rng": Row(hides=LATER_STEPS, spoils=NO_PATTERN, on_purpose=True),
    "same-data": Row(hides=DRIFT | {"norm-dropout-rng"}),  # such ranks' activations are not to be equal
    **dict.fromkeys(UNREDUCED, Row(hides=DRIFT | {"clip-per-rank"})),
    "input-unreduced": Row(spoils=NO_PATTERN, its_tensors=frozenset("*")),
    "copies-begin-apart": Row(its_tensors=frozenset("*")),  # a gradient of one rank's own counts n times an average's
    "cut-graph": Row(spoils=NO_PATTERN, its_tensors=frozenset({"divided-twice"}), on_purpose=True, knows_line=True),
    "score-partial": Row(hides=DRIFT | {"clip-per-rank"}, spoils=NO_PATTERN),
    **dict.fromkeys(
        ("aux-times-world", "aux-times-micro", "aux-over-dp"),
        Row(hides=DRIFT | {"gather-backward-sum"}, spoils=NO_PATTERN | {"gather-backward-sum"}),
    ),
    **dict.fromkeys(("bias-per-micro", "recompute-flip"), Row(hides=LATER_STEPS, spoils=NO_PATTERN)),
    **dict.fromkeys(("norm-omits-experts", "accum-clipped"), Row(hides=DRIFT | {"clip-per-rank"})),
    "gather-cut": Row(hides=DRIFT | {"cut-graph"}, spoils=NO_PATTERN),
    "bf16-reduction": Row(spoils=NO_PATTERN, knows_line=True),
    **dict.fromkeys(SPOILING, Row(spoils=NO_PATTERN)),
    "mean-of-means": Row(on_purpose=True),
    "clip-per-rank": Row(factor_only=True),
    "norm-counts-replicas": Row(factor_only=True),
    "replicas-differ": Row(hides=frozenset()),
    "": Row(hides=frozenset()),
}


def row(bug: str) -> Row:
    """The row of a bug; of one that has none, copies drift and that is all."""
    return CONSEQUENCES.get(bug, Row())


def without_consequences(found: list[Finding]) -> list[Finding]:
    """Leave out what only follows from a finding that is told. Beside a named bug nothing is open."""
    bugs = {f.bug for f in found if f.verdict == BUG}
    causes = {bug for bug in bugs if not any(bug in row(other).hides for other in bugs)}
    hidden = frozenset[str]().union(*(row(bug).hides for bug in causes))
    named = any(bug and bug != "replicas-differ" for bug in bugs)
    whole = [f for f in found if f.verdict == BUG and f.bug in causes and row(f.bug).its_tensors]
    told = [f for f in found if f.verdict != BUG or f.bug not in hidden]
    told = [f for f in told if f.verdict != BUG or not any(_follows(f, one) for one in whole)]
    if any(f.verdict == BUG and f.bug not in DRIFT | ADJOINTS | {""} for f in told):
        told = [f for f in told if f.bug not in ADJOINTS]  # copies that are none make every convention look wrong
    others = {name for f in told if f.verdict == BUG and f.bug not in DRIFT for name in f.tensors}
    told = [f for f in told if f.bug not in DRIFT or not f.tensors or not set(f.tensors) <= others]
    return [f for f in told if f.verdict != INCONCLUSIVE or not named]


def _follows(found: Finding, one: Finding) -> bool:
    inside = found.bug != one.bug and bool(found.tensors) and set(found.tensors) <= set(one.tensors)
    return inside and bool(row(one.bug).its_tensors & {found.bug, "*"})


def spoilt(found: Finding, others: Iterable[Finding]) -> bool:
    """Whether a finding of a comparison is explained by a bug beside it that leaves no gradient as it should be."""
    return any(other.verdict == BUG and found.bug in row(other.bug).spoils for other in others)
