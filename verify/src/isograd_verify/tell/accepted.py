"""Findings that somebody has accepted, by a comment, in pyproject.toml or by a baseline: they become notes, and fail
nothing (docs/verify-in-ci.md). A comment in a program's own file also accepts a finding that no line is known of.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from isograd_verify.errors import VerifyError
from isograd_verify.io.untrusted import CONFIG, FileError, read_json
from isograd_verify.tell.findings import NOTE, UNNAMED, Finding, place
from isograd_verify.tell.report import Report

COMMENT = re.compile(r"#\s*isograd:\s*accept\s+([\w-]+)[ \t]*(.*)")
LONGEST = 1 << 22  # bytes of a source file that are looked at


def accept(report: Report, root: Path, programs: Iterable[str] = (), baseline: Path | None = None) -> None:
    """Turns accepted findings of a report into notes. `root`: where pyproject.toml and the sources are."""
    reasons = [_project(root), _comments(root, tuple(programs))]
    reasons += [_accepted_before(baseline)] if baseline is not None else []
    for subject in report.subjects:
        for number, found in enumerate(subject.findings):
            why = next((why for reason in reasons if (why := reason(found))), "") if found.verdict != NOTE else ""
            if why:
                subject.findings[number] = replace(found, verdict=NOTE, sentence=f"accepted ({why}): {found.sentence}")


def _project(root: Path) -> Callable[[Finding], str]:
    path = root / "pyproject.toml"
    try:
        tool = tomllib.loads(path.read_text())["tool"]["isograd"]["verify"]["accept"] if path.is_file() else {}
    except (KeyError, TypeError):
        tool = {}
    except (OSError, ValueError) as error:
        raise VerifyError("IG726", "pyproject.toml cannot be read", seen=error, fix="see docs/verify.md") from error
    known = tool.items() if isinstance(tool, dict) else ()
    told = {str(code): str(reason) or "pyproject.toml" for code, reason in known}
    return lambda found: told.get(found.bug or UNNAMED, "")


def _comments(root: Path, programs: tuple[str, ...]) -> Callable[[Finding], str]:
    def why(found: Finding) -> str:
        spot = place(found)
        for file in (spot[0],) if spot else programs:
            for number, line in enumerate(_lines(root / file), 1):
                said = COMMENT.search(line)
                near = spot is None or file in programs or number in (spot[1], spot[1] - 1)
                if said and said[1] == (found.bug or UNNAMED) and near:
                    return said[2].strip() or f"{file}:{number}"
        return ""

    return why


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines() if path.stat().st_size <= LONGEST else []
    except OSError:
        return []


def _accepted_before(baseline: Path) -> Callable[[Finding], str]:
    try:
        data: Any = read_json(baseline, CONFIG)
        findings = [f for subject in data["subjects"] for f in subject["findings"]]
        told = {_fingerprint(str(f["bug"]), [str(t) for t in f["tensors"]], str(f["sentence"])) for f in findings}
    except (FileError, KeyError, TypeError) as error:
        seen = error.brief if isinstance(error, FileError) else repr(error)
        raise VerifyError(
            "IG727", f"the baseline {str(baseline)!r} cannot be read", seen=seen,
            expected="a report that 'isograd-verify run --json FILE' has written",
        ) from error  # fmt: skip
    return lambda f: f"in {baseline.name}" if _fingerprint(f.bug, list(f.tensors), f.sentence) in told else ""


def _fingerprint(bug: str, tensors: list[str], sentence: str) -> tuple[str, ...]:
    """The same for a finding of another run: numbers of an unnamed one's sentence may be others."""
    told = re.sub(r"^accepted \(.*?\): ", "", sentence)
    return (bug, *sorted(tensors), "" if bug else re.sub(r"\d[\d.e+-]*", "#", told))
