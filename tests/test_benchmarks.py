"""The race's own rules: who races, in which heat, what is called slower, and when a machine is quiet."""

from __future__ import annotations

import time

import pytest

from benchmarks import quiet, tables
from benchmarks.contestant import ONE, Entry
from benchmarks.data_peers import DDP_ENTRY
from benchmarks.diff import verdict
from benchmarks.ours import DATA
from benchmarks.race import Result, guests_of
from benchmarks.report import chosen_of

ENTRIES = [ONE, DDP_ENTRY, *DATA]


def names(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def test_a_contestant_is_chosen_by_its_whole_name() -> None:
    assert names(chosen_of(ENTRIES, ["zero3"])) == ["isograd zero3"]
    assert names(chosen_of(ENTRIES, ["ISOGRAD zero3*", "ddp"])) == ["DDP", "isograd zero3 kept", "isograd zero3"]
    with pytest.raises(SystemExit, match="called 'zero33'; did you mean 'isograd zero3'"):
        chosen_of(ENTRIES, ["zero33"])


def test_a_later_heat_has_the_reference_and_the_peers_of_those_who_wait() -> None:
    assert names(guests_of(ENTRIES, ENTRIES, ONE)) == []
    waiting = [entry for entry in ENTRIES if entry.name == "isograd zero1"]
    assert names(guests_of(waiting, ENTRIES, ONE)) == ["one process", "DDP"]


def test_a_ratio_is_taken_within_a_heat() -> None:
    mine, peer = Result(DATA[0], seconds=[2.0, 3.0]), Result(DDP_ENTRY, seconds=[4.0, 3.0])
    mine.heat = {"DDP": peer}
    assert mine.ratios("DDP") == [0.5, 1.0]
    assert mine.ratios("one process") is None


def test_slower_means_beyond_both_ranges() -> None:
    assert verdict([1.0, 1.1, 1.2], [1.3, 1.4, 1.5]) == "slower"
    assert verdict([1.3, 1.4, 1.5], [1.0, 1.1, 1.2]) == "faster"
    assert verdict([1.0, 1.1, 1.35], [1.05, 1.3, 1.5]) == ""


def test_work_of_the_race_is_not_foreign() -> None:
    watch, worked = quiet.Watch(), time.process_time()
    while time.process_time() - worked < 0.3:
        pass
    own = time.process_time() - worked
    assert watch.foreign(own) < watch.foreign(0.0)


def test_tables_of_the_docs_are_those_that_scripts_wrote() -> None:
    found = tables.of_page((tables.ROOT / "docs" / "plan.md").read_text(encoding="utf-8"))
    written = {file.stem: file.read_text(encoding="utf-8").strip() for file in tables.FOLDER.glob("*.md")}
    assert {name: text for name, text in found.items() if text != tables.NOT_YET} == written
    assert len(found) == 6
