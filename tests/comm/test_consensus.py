"""Notes of different lengths, and in letters of several bytes, arrive in rank order on every rank."""

from __future__ import annotations

from typing import Any

from isograd.comm.consensus import all_gather_object
from isograd.core.mesh import Mesh

NOTES: list[list[Any]] = [
    [None, {"a": [1, 2.5, True], "b": None}, "", "x" * 5000, ["µ", "日本語", "\n\t \\"], 10**30],
    [[], "rank 1", " ends with spaces  ", "", "é", -1],
]


def gathered() -> list[list[Any]]:
    mesh = Mesh("dp2")
    return [all_gather_object(note, mesh) for note in NOTES[mesh.rank]]


def test_everyone_gets_everyones_note_in_rank_order(worlds) -> None:
    expected = [list(pair) for pair in zip(*NOTES, strict=True)]
    assert worlds(2).run(gathered) == [expected, expected]


def test_alone_a_note_is_its_own_answer() -> None:
    mesh = Mesh.unbound("dp1")
    note = {"as": ("it", "is")}
    assert all_gather_object(note, mesh) == [note]
