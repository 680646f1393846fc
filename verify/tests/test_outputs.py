"""JUnit and SARIF say what the report says, and can be read by others."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from isograd_verify.command import main
from isograd_verify.errors import VerifyError
from isograd_verify.tell.accepted import accept
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, Subject
from isograd_verify.tell.outputs import github, junit, sarif, summary
from isograd_verify.tell.report import Report

from .recordings import Held, Step, numbers, write

CUT = Finding(
    BUG, "cut-graph", "step 1: all_gather at src/train.py:33 in loss has no backward <&>\x00", tensors=("a", "b"),
    axis="dp", coefficients=(("rank 0", 0.5),), site="src/train.py:33 in loss",
)  # fmt: skip
OPEN = Finding(INCONCLUSIVE, "", "cannot be told")
NOTED = Finding(NOTE, "", "torch.compile waited")
REPORT = Report("a run", [Subject("dp2", 2, findings=[NOTED, CUT, OPEN]), Subject("tp2", 2, facts={"steps": "3"})])


def test_junit_has_a_failure_per_bug_an_error_per_open_question_and_a_case_that_passed() -> None:
    suites = ElementTree.fromstring(junit(REPORT))
    first, second = suites.findall("testsuite")
    assert [first.get(key) for key in ("name", "tests", "failures", "errors")] == ["dp2", "2", "1", "1"]
    assert [second.get(key) for key in ("name", "tests", "failures", "errors")] == ["tp2", "1", "0", "0"]
    (failure,) = suites.iter("failure")
    assert failure.get("message") == "step 1: all_gather at src/train.py:33 in loss has no backward <&>?"
    assert {"over: dp", "tensors: a, b", "rank 0: 0.5", f"look at: {CUT.look}"} <= set((failure.text or "").split("\n"))
    (error,) = suites.iter("error")
    assert (error.get("type"), error.get("message")) == ("unnamed", "cannot be told")
    assert [case.get("name") for case in second.findall("testcase")] == ["gradients"]
    assert not list(second.iter("failure"))
    assert [out.text for out in suites.iter("system-out")] == ["torch.compile waited", "steps: 3"]


def test_sarif_has_a_rule_per_bug_and_the_line_that_a_finding_names() -> None:  # V13, V19
    told = json.loads(sarif(REPORT, "train.py"))
    (run,) = told["runs"]
    assert told["version"] == "2.1.0" and told["$schema"].endswith("sarif-2.1.0.json")
    assert [(r["ruleId"], r["level"]) for r in run["results"]] == [
        ("unnamed", "note"), ("cut-graph", "error"), ("unnamed", "warning"),
    ]  # fmt: skip
    spots = [r["locations"][0]["physicalLocation"] for r in run["results"]]
    assert [(s["artifactLocation"]["uri"], s["region"]["startLine"]) for s in spots] == [
        ("train.py", 1), ("src/train.py", 33), ("train.py", 1),
    ]  # fmt: skip
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["unnamed", "cut-graph"]
    assert "locations" not in json.loads(sarif(REPORT))["runs"][0]["results"][0]


def test_a_file_that_a_sentence_only_mentions_is_no_place() -> None:  # V13
    mentions = Finding(BUG, "", "the loss differs; see other.py:7", site="loop.py:12 in <module>")
    (result,) = json.loads(sarif(Report("a run", [Subject("dp2", 2, findings=[mentions])])))["runs"][0]["results"]
    spot = result["locations"][0]["physicalLocation"]
    assert (spot["artifactLocation"]["uri"], spot["region"]["startLine"]) == ("loop.py", 12)


def test_annotations_stand_at_the_lines_and_hold_hostile_text() -> None:  # V13
    lines = github(REPORT, "train.py").splitlines()
    assert lines[0] == "::notice file=train.py,line=1,title=isograd-verify%3A unnamed::torch.compile waited"
    assert lines[1].startswith("::error file=src/train.py,line=33,title=isograd-verify%3A cut-graph::step 1: all_g")
    hostile = Finding(BUG, "", "a\n::error::b | <script>", site="a,b:c.py:3")
    report = Report("a run", [Subject("dp2", 2, findings=[hostile])])
    assert github(report).count("\n") == 1
    assert "<script>" not in summary(report) and "a ::error::b \\| " in summary(report)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    line = "x = gather(y)  # isograd: accept cut-graph it is a metric\n"
    (tmp_path / "src" / "train.py").write_text("\n" * 32 + line)
    return tmp_path


def accepted(report: Report) -> list[tuple[str, str]]:
    return [(f.verdict, f.bug) for f in report.subjects[0].findings]


def copied() -> Report:
    return Report("a run", [Subject("dp2", 2, findings=[CUT, OPEN])])


def test_a_comment_at_its_line_accepts_a_finding_with_its_reason(project: Path) -> None:  # V13
    report = copied()
    accept(report, project)
    assert accepted(report) == [(NOTE, "cut-graph"), (INCONCLUSIVE, "")]
    assert report.subjects[0].findings[0].sentence.startswith("accepted (it is a metric): step 1: all_gather")
    source = project / "src" / "train.py"
    source.write_text("\n" + source.read_text())  # two lines away it is about something else
    source.write_text("\n" + source.read_text())
    report = copied()
    accept(report, project)
    assert accepted(report) == [(BUG, "cut-graph"), (INCONCLUSIVE, "")]


def test_a_project_accepts_by_its_configuration_and_a_baseline_what_it_knew(project: Path) -> None:  # V13
    (project / "src" / "train.py").unlink()
    (project / "pyproject.toml").write_text('[tool.isograd.verify.accept]\nunnamed = "known since May"\n')
    report = copied()
    accept(report, project)
    assert accepted(report) == [(BUG, "cut-graph"), (NOTE, "")]
    baseline = project / "known.json"
    baseline.write_text(json.dumps(copied().data()))
    (project / "pyproject.toml").unlink()
    report = copied()
    report.subjects[0].findings.append(Finding(BUG, "nosync-missing", "new"))
    accept(report, project, baseline=baseline)
    assert accepted(report) == [(NOTE, "cut-graph"), (NOTE, ""), (BUG, "nosync-missing")]
    baseline.write_text("[]")
    with pytest.raises(VerifyError, match="IG727"):
        accept(report, project, baseline=baseline)
    (project / "pyproject.toml").write_text("[tool")
    with pytest.raises(VerifyError, match="IG726"):
        accept(report, project)


def test_the_command_line_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, gradient = numbers(4, 3), numbers(4, 3, seed=1)
    for name, factor in (("one", 1.0), ("two", 0.5)):
        write(tmp_path / name, [[Step({"w": Held(value, factor * gradient)})]])
    files = [tmp_path / "report.xml", tmp_path / "report.sarif"]
    options = ["--junit", str(files[0]), "--sarif", str(files[1])]
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two"), *options]) == 3
    assert "BUG" in capsys.readouterr().out
    assert len(list(ElementTree.parse(files[0]).iter("failure"))) == 1
    assert [r["level"] for r in json.loads(files[1].read_text())["runs"][0]["results"]] == ["error"]


def test_what_is_known_or_only_open_fails_nothing_where_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value, gradient = numbers(4, 3), numbers(4, 3, seed=1)
    for name, factor in (("one", 1.0), ("two", 0.5)):
        write(tmp_path / name, [[Step({"w": Held(value, factor * gradient)})]])
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    compared = ["compare", str(tmp_path / "one"), str(tmp_path / "two")]
    assert main([*compared, "--json", str(tmp_path / "known.json"), "--github"]) == 3
    assert "::error title=isograd-verify%3A " in capsys.readouterr().out
    assert "### isograd-verify: BUG" in (tmp_path / "summary.md").read_text()
    assert main([*compared, "--baseline", str(tmp_path / "known.json")]) == 0
    write(tmp_path / "open", [[Step({"w": Held(value, gradient, after=value)})]])
    options = [*compared[:2], str(tmp_path / "open")]
    assert (main(options), main([*options, "--fail-on", "bug"])) == (4, 0)
