"""The race's own rules: who races, in which heat, what is called slower, and when a machine is quiet."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import all as every
from benchmarks import (
    diff,
    first_step,
    floors,
    one_device,
    operators,
    pipeline_peers,
    quiet,
    race,
    report,
    seat,
    tables,
)
from benchmarks.contestant import ONE, Entry
from benchmarks.data_peers import DDP_ENTRY
from benchmarks.diff import verdict
from benchmarks.ours import DATA
from benchmarks.pipeline_ours import PIPELINE
from benchmarks.race import Result, guests_of
from benchmarks.report import chosen_of
from benchmarks.task import Sizes
from isograd.launcher.launch import World

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


def test_the_peer_of_a_contestant_is_the_fastest_that_does_the_same() -> None:
    zero1 = next(entry for entry in DATA if entry.name == "isograd zero1")
    mine, slow = Result(zero1, seconds=[1.0, 1.0]), Result(DDP_ENTRY, seconds=[4.0, 3.0])
    fast = Result(replace(DDP_ENTRY, name="ZeroRedundancyOptimizer"), seconds=[2.0, 2.5])
    mine.heat = {"DDP": slow}
    assert mine.peer == "DDP"
    mine.heat = {"DDP": slow, "ZeroRedundancyOptimizer": fast}
    assert mine.peer == "ZeroRedundancyOptimizer"


def test_a_turn_that_others_disturb_is_repeated_and_counted_where_that_does_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ranks:
        """In the place of a World: each turn takes a second more than the one before."""

        turns = 0

        def run(self, *args: object, **kwargs: object) -> list[seat.Turn]:
            self.turns += 1
            return [seat.Turn(float(self.turns), 0.0, 0.0, 0.0, [])]

    foreign = iter([True, True, False])
    monkeypatch.setattr(quiet.Watch, "disturbed", lambda self: next(foreign))
    result = Result(DDP_ENTRY)
    assert race._turn(result, Ranks(), [], Sizes(), 1, 1, race.ATTEMPTS)[0].seconds == 3.0  # type: ignore[arg-type]
    assert result.disturbed == 0
    monkeypatch.setattr(quiet.Watch, "disturbed", lambda self: True)
    assert race._turn(result, Ranks(), [], Sizes(), 1, 1, 2)[0].seconds == 2.0  # type: ignore[arg-type]
    assert result.disturbed == 1


def test_what_a_peer_says_is_heard_with_its_error_only(capfd: pytest.CaptureFixture[str]) -> None:
    with seat.unheard():
        os.write(1, b"welcome")
    with pytest.raises(ValueError, match="no rank") as caught, seat.unheard():
        os.write(2, b"compiling")
        raise ValueError("no rank")
    assert "compiling" in caught.value.__notes__[0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.medium
def test_a_race_becomes_rows_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = replace(Sizes().tiny(), batch=2, micro_batches=2, layers=2)
    pair = ("torch 1F1B", "isograd 1f1b")
    entries = [ONE, *(entry for entry in [*pipeline_peers.PEERS, *PIPELINE] if entry.name in pair)]
    results = race.run(entries, sizes, 2, rounds=2, steps=1, errors=True, attempts=1, settle=1)
    rows = [report.row(result, sizes, 2) for result in results]
    assert [row["name"] for row in rows] == names(entries)
    assert all(row["even"]["total"] < 1e-5 for row in rows if row["name"] != ONE.name)
    assert all(0 <= row["bubble"]["theory"] < 1 for row in rows if row["name"] in pair)
    where = {"processor": "a machine", "torch": "2"}
    document = {"commit": "abc", "machine": where, "quick": True, "races": {"tiny-2": {"rows": rows}}}
    assert [(line.name, line.peer) for line in every.lines(document)] == [pair[::-1]]
    every.draw(document, tmp_path / "race.svg")
    drawn = (tmp_path / "race.svg").read_text()
    assert all(text in drawn for text in ("tiny: 1f1b beside torch 1F1B", "a machine", "commit abc", "2 rounds"))
    assert set(diff.rounds(document, "")) == {("tiny-2", entry.name) for entry in entries[1:]}


@pytest.mark.medium
def test_floors_send_what_the_bound_says() -> None:
    sizes = replace(Sizes().tiny(), batch=2, micro_batches=2, layers=2)
    entries = [*floors.PIPELINE, *floors.TENSOR, *floors.ULYSSES]
    results = race.run(entries, sizes, 2, rounds=1, steps=2, errors=False, attempts=1, settle=1)
    for result in results:  # headers of messages come on top, and they are many beside tiny messages
        assert result.wire[0] >= result.entry.bound(sizes, 2)


def test_a_race_that_fails_is_left_out_and_named_and_one_of_this_commit_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    monkeypatch.setattr(every, "RACES", {"gone-2": ["no_such_race"]})
    with pytest.raises(SystemExit, match="nothing is written"):
        every.run(path, False, True, ["gone-2"], False)
    assert "benchmarks.no_such_race --anyway ended with 1: left out" in capsys.readouterr().out
    assert not path.exists()
    kept = {"commit": every.commit(), "machine": report.machine(), "quick": False, "minutes": 3.0}
    path.write_text(json.dumps(kept | {"races": {"gone-2": {"rows": []}}}))
    assert every.run(path, False, True, ["gone-2"], True)["races"] == {"gone-2": {"rows": []}}


def test_the_picture_in_the_readme_is_of_the_numbers_beside_it() -> None:
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert next(number for number, line in enumerate(readme) if "(docs/race.svg)" in line) < 60  # two screens
    document = json.loads((tables.ROOT / "benchmarks" / "results" / "race.json").read_text(encoding="utf-8"))
    drawn = (tables.ROOT / "docs" / "race.svg").read_text(encoding="utf-8")
    found = list(every.lines(document))
    assert len(found) > 5
    for line in found:
        assert f"{line.median:.2f}" in drawn
        assert f"{line.name.removeprefix('isograd ')} beside {line.peer}" in drawn
    assert document["commit"] in drawn
    assert document["machine"]["processor"] in drawn


def test_slower_means_beyond_both_ranges() -> None:
    assert verdict([1.0, 1.1, 1.2], [1.3, 1.4, 1.5]) == "slower"
    assert verdict([1.3, 1.4, 1.5], [1.0, 1.1, 1.2]) == "faster"
    assert verdict([1.0, 1.1, 1.35], [1.05, 1.3, 1.5]) == ""


def test_work_of_the_race_is_not_foreign() -> None:
    """Neither this process' nor that of a contestant that waits for its turn."""
    with World(1) as world:
        world.run(abs, 1)
        known, unknown = quiet.Watch(world.pids), quiet.Watch()
        world.run(sum, range(10**7))
        assert known.foreign() < unknown.foreign()


def test_tables_of_the_docs_are_those_that_scripts_wrote() -> None:
    pages = [
        (tables.ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("plan-accuracy.md", "imagined-gpu.md")
    ]
    found = tables.of_page("\n".join(pages))
    written = {file.stem: file.read_text(encoding="utf-8").strip() for file in tables.FOLDER.glob("*.md")}
    assert {name: text for name, text in found.items() if text != tables.NOT_YET} == written
    assert len(found) == 7


@pytest.mark.medium
def test_contestants_on_one_device_have_the_same_gradients_and_no_graph_breaks() -> None:
    sizes = replace(Sizes().tiny(), batch=2, layers=2)
    results = race.run([ONE, *one_device.EAGER], sizes, 1, rounds=1, steps=1, errors=True, attempts=1, settle=1)
    assert [names([r.entry])[0] for r in results[1:] if r.even and r.even.total < 1e-5] == names(one_device.EAGER)
    own = [entry for entry in one_device.COMPILED if entry.name.startswith("isograd")]
    assert one_device.counted(own, sizes) == "graph breaks: isograd, compiled blocks: 0 in 1 graph"


@pytest.mark.medium
def test_operators_are_measured_beside_torchs() -> None:
    rows = operators.measured(replace(Sizes().tiny(), batch=2), 1)
    assert {row["form"] for row in rows if row["operator"] == "rotary"} == {"torch", "transformers", "isograd"}
    assert all(row["of_torch"] == 1.0 for row in rows if row["form"] == "torch")
    assert all(row["peak_bytes"] > 0 for row in rows)


@pytest.mark.medium
@pytest.mark.parametrize("name", first_step.PROGRAMS)
def test_the_way_to_the_first_step_is_measured_in_order(name: str) -> None:
    times = first_step.once(name, replace(Sizes().tiny(), batch=1, layers=1))
    assert tuple(times) == first_step.PHASES
    assert list(times.values()) == sorted(times.values())
