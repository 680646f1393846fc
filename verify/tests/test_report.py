"""What a report says on the terminal and as data: all verdicts, NaN, and names that look like markup."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from isograd_verify.record.events import Collective
from isograd_verify.record.recording import RankWriter, Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject, kind, listed
from isograd_verify.tell.report import MOST_EVENTS, Report, render, timeline

NAMES = tuple(f"blocks.{i}.norm1.weight" for i in range(5))


def passing() -> Subject:
    errors = {name: 1e-16 * (i + 1) for i, name in enumerate(NAMES)}
    return Subject("tp2", 2, compared=True, errors=errors, facts={"loss": "equal to 3e-16"})


def buggy() -> Subject:
    found = Finding(
        BUG, "norm-unreduced", "norms are not summed over tp", NAMES, "tp",
        tuple((f"rank {i}", float(i == 0)) for i in range(11)), "a missing all-reduce", "the list of parameters",
    )  # fmt: skip
    errors = {**dict.fromkeys(NAMES, 0.25), "head.weight": 2e-16}
    return Subject("tp2 sp", 2, compared=True, findings=[found], errors=errors)


def open_question() -> Subject:
    return Subject("a run", 3, findings=[Finding(INCONCLUSIVE, "", "no optimizer stepped"), Finding(NOTE, "", "by")])


def text_of(*subjects: Subject, **options: object) -> str:
    return render(Report("a title", list(subjects)), **options)  # type: ignore[arg-type]


def test_a_pass_is_a_table_and_a_line() -> None:
    text = text_of(passing())
    assert text.startswith("a title\n")
    row = next(line for line in text.splitlines() if "blocks.*.norm1.weight" in line)
    assert "5.0e-16" in row
    assert "PASS tp2 (2 ranks)  loss: equal to 3e-16" in text
    assert text.rstrip().endswith("PASS  (1 PASS, 0 BUG, 0 INCONCLUSIVE)")


def test_a_bug_is_told_with_its_tensors_coefficients_cause_and_place() -> None:
    lines = [line.strip() for line in text_of(buggy(), width=200).splitlines()]
    row = next(line for line in lines if "blocks.*.norm1.weight" in line)
    assert "2.5e-01 BUG" in row
    assert "BUG" not in next(line for line in lines if "head.weight" in line)
    assert "BUG norm-unreduced: norms are not summed over tp" in lines
    coefficients = next(line for line in lines if line.startswith("coefficients:"))
    assert coefficients.startswith("coefficients: rank 0: 1, rank 1: 0,")
    assert coefficients.endswith("rank 7: 0 and 3 more")
    assert f"tensors: {', '.join(NAMES)}" in lines
    assert "usual cause: a missing all-reduce" in lines
    assert "look at: the list of parameters" in lines
    assert lines[-1] == "BUG  (0 PASS, 1 BUG, 0 INCONCLUSIVE)"


def test_what_could_not_be_told_is_said_and_notes_change_no_verdict() -> None:
    text = text_of(open_question())
    assert "INCONCLUSIVE a run (3 ranks)" in text
    assert "  INCONCLUSIVE: no optimizer stepped" in text
    assert "  NOTE: by" in text
    assert "parameter" not in text, "nothing was compared: no table"
    assert Subject("x", 1, findings=[Finding(NOTE, "", "by")]).verdict == PASS


def test_three_verdicts_stand_side_by_side_and_are_never_merged() -> None:
    text = text_of(passing(), buggy(), open_question())
    assert text.rstrip().endswith("BUG  (1 PASS, 1 BUG, 1 INCONCLUSIVE)")
    head = next(line for line in text.splitlines() if "head.weight" in line)
    assert [cell.strip() for cell in head.strip("│").split("│")][1:] == ["-", "2.0e-16"]


@pytest.mark.parametrize(
    ("subjects", "verdict", "code"),
    [
        ([passing()], PASS, 0),
        ([passing(), buggy()], BUG, 3),
        ([passing(), open_question()], INCONCLUSIVE, 4),
        ([open_question(), buggy(), passing()], BUG, 3),
        ([], INCONCLUSIVE, 4),
    ],
)
def test_a_report_is_ok_only_when_every_subject_passed(subjects: list[Subject], verdict: str, code: int) -> None:
    report = Report("a title", subjects)
    assert (report.verdict, report.exit_code, report.ok, bool(report)) == (verdict, code, code == 0, code == 0)
    assert str(report) == render(report)


def test_a_run_that_was_only_watched_has_no_table_of_errors() -> None:
    watched = Subject("a run", 2, errors=dict.fromkeys(NAMES, 0.25))
    assert "largest relative error" not in text_of(watched)
    text = text_of(passing(), watched)
    assert "largest relative error" in text
    assert "2.5e-01" not in text


HOSTILE = "[red]a[/red].weight"


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    found = Finding(
        BUG,
        "order",
        f"{HOSTILE} [/] differs",
        (HOSTILE, "[bold]", "c", "d"),
        "",
        ((f"{HOSTILE} r", 1.0),),
        "[i]",
        "[/i]",
    )
    subject = Subject(HOSTILE, 2, True, [found], errors={HOSTILE: 0.5}, facts={"[blue]": "[/blue]"})
    text = render(Report(HOSTILE, [subject]))
    assert text.startswith(f"{HOSTILE}\n")
    row = next(line for line in text.splitlines() if "5.0e-01" in line)
    assert HOSTILE in row
    for shown in (f"{HOSTILE} [/] differs", f"{HOSTILE} r: 1", "tensors: [red]a", "[bold]", "cause: [i]", "at: [/i]"):
        assert shown in text
    assert f"BUG {HOSTILE} (2 ranks)  [blue]: [/blue]" in text


def test_colours_appear_only_when_asked_for() -> None:
    assert "\x1b[" not in text_of(passing(), buggy())
    coloured = text_of(passing(), buggy(), colour=True)
    assert "\x1b[31mBUG norm-unreduced\x1b[0m" in coloured


def test_nan_is_the_worst_error_of_its_kind() -> None:
    errors = {"blocks.0.a": 0.5, "blocks.1.a": math.nan, "blocks.2.a": 0.7, "blocks.3.b": 1e-16}
    subject = Subject("dp2", 2, compared=True, errors=errors)
    error, tensor, verdict = subject.classes()["blocks.*.a"]
    assert math.isnan(error)
    assert (tensor, verdict) == ("blocks.1.a", PASS)
    assert "nan" in next(line for line in text_of(subject).splitlines() if "blocks.*.a" in line)


def test_the_verdict_of_a_kind_is_that_of_its_worst_tensor() -> None:
    found = [Finding(INCONCLUSIVE, "", "", ("a.0.w",)), Finding(BUG, "", "", ("a.1.w",))]
    subject = Subject("dp2", 2, findings=found, errors={"a.0.w": 0.9, "a.1.w": 0.1, "b.w": 0.0})
    assert [subject.verdict_of(name) for name in subject.errors] == [INCONCLUSIVE, BUG, PASS]
    assert subject.classes() == {"a.*.w": (0.9, "a.0.w", BUG), "b.w": (0.0, "b.w", PASS)}


def test_data_is_plain_json_in_which_numbers_that_are_none_are_words() -> None:
    subject = buggy()
    subject.errors |= {"nan": math.nan, "up": math.inf, "down": -math.inf}
    subject.by_rank["head.weight"] = [None, math.nan, 0.5]
    subject.timeline = [[{"op": "all_reduce", "seconds": math.inf}], []]
    report = Report("a title", [subject, passing()])
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    assert (data["version"], data["title"], data["verdict"]) == (1, "a title", BUG)
    first, second = data["subjects"]
    assert [first["verdict"], second["verdict"]] == [BUG, PASS]
    assert [first["errors"][name] for name in ("nan", "up", "down")] == ["NaN", "Infinity", "-Infinity"]
    assert first["by_rank"]["head.weight"] == [None, "NaN", 0.5]
    assert first["timeline"][0][0] == {"op": "all_reduce", "seconds": "Infinity"}
    assert first["findings"][0]["bug"] == "norm-unreduced"
    assert first["findings"][0]["tensors"] == list(NAMES)
    norms = {"class": "blocks.*.norm1.weight", "error": 0.25, "tensor": NAMES[0], "verdict": BUG}
    assert norms in first["classes"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.3.norm1.weight", "blocks.*.norm1.weight"),
        ("0.weight", "*.weight"),
        ("layers.12.experts.7", "layers.*.experts.*"),
        ("h10.mlp.weight", "h10.mlp.weight"),
        ("weight", "weight"),
    ],
)
def test_numbers_between_dots_do_not_make_another_kind(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_long_lists_are_cut_and_counted() -> None:
    assert listed(("a", "b", "c")) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert listed(()) == ""


def test_the_timeline_has_a_lane_per_rank_and_an_end(tmp_path: Path) -> None:
    for rank, count in enumerate((2, MOST_EVENTS + 3)):
        writer = RankWriter(tmp_path, rank, 2)
        for n in range(count):
            writer.event(Collective(n=n, op="all_reduce", group=(0, 1), bytes=8, covers=("a",)))
        writer.close()
    lanes = timeline(Recording(tmp_path))
    assert [len(lane) for lane in lanes] == [2, MOST_EVENTS]
    assert lanes[0][0].items() >= {"group": "0,1", "op": "all_reduce", "bytes": 8}.items()
    assert "seconds" not in lanes[0][0], "the call never ended"
