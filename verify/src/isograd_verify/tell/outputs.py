"""A report in the formats that continuous integration reads: JUnit XML, and SARIF 2.1.0 for code scanning."""

from __future__ import annotations

import html
import json
import re
from typing import Any
from xml.etree import ElementTree

from isograd_verify.tell.catalogue import BUGS
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, UNNAMED, Finding, place
from isograd_verify.tell.report import Report

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LEVELS = {BUG: "error", INCONCLUSIVE: "warning", NOTE: "note"}


def junit(report: Report) -> str:
    """One suite per subject: a case for each finding that is no note, or a single case that passed."""
    suites = ElementTree.Element("testsuites", name=_plain(report.title))
    for subject in report.subjects:
        open_ = [f for f in subject.findings if f.verdict in (BUG, INCONCLUSIVE)]
        counts = {verdict: str(sum(f.verdict == verdict for f in open_)) for verdict in (BUG, INCONCLUSIVE)}
        suite = ElementTree.SubElement(
            suites,
            "testsuite",
            name=_plain(subject.name),
            tests=str(max(1, len(open_))),
            failures=counts[BUG],
            errors=counts[INCONCLUSIVE],
        )
        for number, found in enumerate(open_, 1):
            name = f"{number} {found.bug or UNNAMED}"
            case = ElementTree.SubElement(suite, "testcase", classname=_plain(subject.name), name=_plain(name))
            kind = "failure" if found.verdict == BUG else "error"
            told = ElementTree.SubElement(case, kind, message=_plain(found.sentence), type=found.bug or UNNAMED)
            told.text = _plain(_details(found))
        if not open_:
            ElementTree.SubElement(suite, "testcase", classname=_plain(subject.name), name="gradients")
        notes = [f.sentence for f in subject.findings if f.verdict == NOTE]
        facts = [f"{key}: {value}" for key, value in subject.facts.items()]
        if notes or facts:
            ElementTree.SubElement(suite, "system-out").text = _plain("\n".join([*facts, *notes]))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def sarif(report: Report, source: str = "") -> str:
    """Findings as results of rules, one rule per bug. `source`: the program's file, where a finding names no line."""
    results: list[dict[str, Any]] = []
    for subject in report.subjects:
        for found in subject.findings:
            result: dict[str, Any] = {
                "ruleId": found.bug or UNNAMED,
                "level": LEVELS[found.verdict],
                "message": {"text": f"{subject.name}: {found.sentence}"},
            }
            file, line = place(found) or (source, 1)
            if file:
                spot = {"artifactLocation": {"uri": file}, "region": {"startLine": max(1, line)}}
                result["locations"] = [{"physicalLocation": spot}]
            results.append(result)
    rules: list[dict[str, Any]] = []
    for bug in dict.fromkeys(result["ruleId"] for result in results):
        known = BUGS.get(bug)
        about = {"shortDescription": {"text": known.cause if known else "a finding that fits no known bug"}}
        rules.append({"id": bug, **about, **({"help": {"text": f"look at: {known.look}"}} if known else {})})
    tool = {"driver": {"name": "isograd-verify", "rules": rules}}
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": tool, "results": results}]}
    return json.dumps(log, indent=1) + "\n"


def github(report: Report, source: str = "") -> str:
    """Workflow commands of GitHub Actions: one annotation per finding, at its line."""
    lines = []
    for subject in report.subjects:
        for found in subject.findings:
            file, line = place(found) or (source, 1)
            kind = {BUG: "error", INCONCLUSIVE: "warning"}.get(found.verdict, "notice")
            where = f"file={_value(file)},line={line}," if file else ""
            title = _value(f"isograd-verify: {found.bug or UNNAMED}")
            lines.append(f"::{kind} {where}title={title}::{_escaped(found.sentence)}\n")
    return "".join(lines)


def summary(report: Report) -> str:
    """The job summary, in Markdown."""
    rows = [f"### isograd-verify: {report.verdict}", "", "| verdict | what | where |", "|---|---|---|"]
    for subject in report.subjects:
        for found in subject.findings or [Finding(subject.verdict, "", subject.name)]:
            cells = (f"{found.verdict} {found.bug}".strip(), found.sentence, found.site)
            rows.append("| " + " | ".join(html.escape(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |")
    return "\n".join(rows) + "\n"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _details(found: Finding) -> str:
    lines = [found.sentence]
    if found.axis:
        lines.append(f"over: {found.axis}")
    if found.tensors:
        lines.append(f"tensors: {', '.join(found.tensors)}")
    lines += [f"{name}: {value:.6g}" for name, value in found.coefficients]
    if found.cause:
        lines += [f"usual cause: {found.cause}", f"look at: {found.look}"]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return NOT_XML.sub("?", text)
