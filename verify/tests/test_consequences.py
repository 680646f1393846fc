"""What follows from a bug that is told is not told beside it, and nothing else is left out."""

from __future__ import annotations

import pytest

from isograd_verify.judge.consequences import CONSEQUENCES, row, spoilt, without_consequences
from isograd_verify.tell.catalogue import BUGS
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding


def told(*found: Finding) -> list[str]:
    return [f.bug for f in without_consequences(list(found))]


def bug(name: str, *tensors: str) -> Finding:
    return Finding(BUG, name, name, tensors=tensors)


def test_every_id_of_the_table_is_in_the_catalogue() -> None:
    named = {*CONSEQUENCES, *(one for r in CONSEQUENCES.values() for one in r.hides | r.spoils)}
    assert named - {""} <= set(BUGS)


def test_no_two_bugs_hide_one_another() -> None:
    below = {cause: set(r.hides & CONSEQUENCES.keys()) for cause, r in CONSEQUENCES.items()}
    while leaves := {cause for cause, hides in below.items() if not hides & below.keys()}:
        below = {cause: hides for cause, hides in below.items() if cause not in leaves}
    assert not below


FOUND = {
    "a missing sum lets copies drift and norms differ": (
        ["norm-unreduced", "replicas-differ", "clip-per-rank"], ["norm-unreduced"],
    ),
    "drifting copies alone": (["replicas-differ"], ["replicas-differ"]),
    "a lone step spoils all that follows": (["overflow-alone", "order", "norm-unreduced", ""], ["overflow-alone"]),
    "what is hidden hides nothing": (["same-data", "norm-dropout-rng", "order"], ["same-data", "order"]),
    "two bugs of which neither follows": (["mean-of-means", "cut-graph"], ["mean-of-means", "cut-graph"]),
    "no bug that is known": (["", "replicas-differ"], ["", "replicas-differ"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_follows_is_left_out(name: str) -> None:
    found, left = FOUND[name]
    assert told(*map(bug, found)) == left


def test_beside_a_named_bug_nothing_is_open_and_notes_stay() -> None:
    still, note = Finding(INCONCLUSIVE, "", "open"), Finding(NOTE, "", "note")
    assert without_consequences([bug("cut-graph"), still, note]) == [bug("cut-graph"), note]
    assert without_consequences([bug("replicas-differ"), still, note]) == [bug("replicas-differ"), still, note]


def test_a_bug_may_explain_all_of_its_own_tensors_and_none_of_others() -> None:
    cause = bug("copies-begin-apart", "value.weight", "value.bias")
    assert told(cause, bug("gather-backward-sum", "value.bias")) == ["copies-begin-apart"]
    assert told(cause, bug("gather-backward-sum", "up.weight")) == ["copies-begin-apart", "gather-backward-sum"]


def test_beside_a_reference_a_cut_graph_looks_like_a_missing_sum() -> None:
    assert spoilt(bug("norm-unreduced"), [bug("cut-graph")])
    assert not spoilt(bug("mean-of-means"), [bug("cut-graph")])
    assert not spoilt(bug("norm-unreduced"), [Finding(INCONCLUSIVE, "cut-graph", "")])
    assert row("a bug without a row").hides == {"replicas-differ"}
