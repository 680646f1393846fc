"""JUnit and SARIF say what the report says, and can be read by others."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from isograd.cli import main
from isograd.verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, Subject
from isograd.verify.tell.outputs import junit, sarif
from isograd.verify.tell.report import Report
from isograd.verify.tell.wording import finding

from .recordings import Held, Step, numbers, write

CUT = finding(
    BUG, "cut-graph", "step 1: all_gather at src/train.py:33 in loss has no backward <&>\x00", tensors=("a", "b"),
    axis="dp", coefficients=(("rank 0", 0.5),),
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


def test_sarif_has_a_rule_per_bug_and_the_line_that_a_finding_names() -> None:
    told = json.loads(sarif(REPORT, "train.py"))
    (run,) = told["runs"]
    assert told["version"] == "2.1.0"
    assert [(r["ruleId"], r["level"]) for r in run["results"]] == [
        ("unnamed", "note"), ("cut-graph", "error"), ("unnamed", "warning"),
    ]  # fmt: skip
    spots = [r["locations"][0]["physicalLocation"] for r in run["results"]]
    assert [(s["artifactLocation"]["uri"], s["region"]["startLine"]) for s in spots] == [
        ("train.py", 1), ("src/train.py", 33), ("train.py", 1),
    ]  # fmt: skip
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["unnamed", "cut-graph"]
    assert "locations" not in json.loads(sarif(REPORT))["runs"][0]["results"][0]


def test_the_command_line_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, gradient = numbers(4, 3), numbers(4, 3, seed=1)
    for name, factor in (("one", 1.0), ("two", 0.5)):
        write(tmp_path / name, [[Step({"w": Held(value, factor * gradient)})]])
    files = [tmp_path / "report.xml", tmp_path / "report.sarif"]
    options = ["--junit", str(files[0]), "--sarif", str(files[1])]
    assert main(["verify", "compare", str(tmp_path / "one"), str(tmp_path / "two"), *options]) == 3
    assert "BUG" in capsys.readouterr().out
    assert len(list(ElementTree.parse(files[0]).iter("failure"))) == 1
    assert [r["level"] for r in json.loads(files[1].read_text())["runs"][0]["results"]] == ["error"]
