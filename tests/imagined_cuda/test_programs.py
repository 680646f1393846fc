"""Each planted fault is named, with its lines; the same program without the fault has none."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest

from . import Finding, programs, right, run
from .programs import PROGRAMS

FILE = str(programs.__file__)
ENDS = r"CommunicatorError: communicator .*\n$|CUDA out of memory"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planted_fault_is_named(name: str) -> None:
    program = PROGRAMS[name]
    results = run(program.run, program.ranks, True, seconds=program.seconds, lag=program.lag)
    found = [finding for result in results for finding in result.of(program.kind) if program.says in finding.text]
    assert found, [(r.error, [str(f) for f in r.findings]) for r in results]
    assert any(names(finding, program.lines) for finding in found), [str(finding) for finding in found]
    for result in results:  # nothing else is found, and no rank ends in another way
        others = [f for f in result.faults if f.kind not in program.also and f not in found]
        assert not others, [str(finding) for finding in others]
        assert not result.error or (program.kind == "communicator" and re.search(ENDS, result.error)), result.error


def names(finding: Finding, lines: tuple[str, ...], file: str = FILE) -> bool:
    """Whether it names these lines: of its two accesses, or, where ranks called different things, of each rank."""
    said = f"{finding.first} | {finding.second}"
    if "not the same order" in finding.text or "did not end" in finding.text:
        said = finding.text
    places = re.split(r" \| |, rank \d+ calls", said)[-2:]
    here = re.compile(rf"{re.escape(Path(file).name)}:(\d+)")
    named = [{linecache.getline(file, int(n)) for n in here.findall(place)} for place in places]
    if len(lines) == 1:
        return any(lines[0] in line for one in named for line in one)
    return all(any(part in line for line in one) for part, one in zip(lines, named, strict=True))


def test_there_are_twenty_faults_and_most_have_two_places() -> None:
    assert len(PROGRAMS) >= 35 and all(program.says for program in PROGRAMS.values())
    assert sum(len(program.lines) == 2 for program in PROGRAMS.values()) >= 15


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_right_twin_of_a_fault_has_no_finding(name: str) -> None:
    program = PROGRAMS[name]
    results = run(program.run, program.ranks, False, seconds=60, lag=program.lag)
    right(results)
    for result in results:
        assert not [f for f in result.of(program.kind) if program.says in f.text and "assert" not in f.text]
