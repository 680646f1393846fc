"""Each planted fault is named, with its lines; the same program without it has none."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

import pytest

from . import Finding, programs, right, run
from .programs import PROGRAMS, Fault

FILE = str(programs.__file__)
ENDS = r"CommunicatorError: communicator .*\n$|CUDA out of memory"


FAULTS = {f"{one.__name__}, {f.name}": (one, ranks, f) for one, (ranks, faults) in PROGRAMS.items() for f in faults}


@pytest.mark.parametrize(("program", "ranks", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named(program: Any, ranks: int, fault: Fault) -> None:
    results = run(program, ranks, fault.name, seconds=fault.seconds)
    found = [finding for result in results for finding in result.of(fault.kind) if fault.says in finding.text]
    assert found, [(r.error, [str(f) for f in r.findings]) for r in results]
    assert any(names(finding, fault.lines) for finding in found), [str(finding) for finding in found]
    for result in results:  # nothing else is found, and no rank ends in another way
        others = [f for f in result.faults if f.kind != fault.also and f not in found]
        assert not others, [str(finding) for finding in others]
        assert not result.error or (fault.kind == "communicator" and re.search(ENDS, result.error)), result.error


def names(finding: Finding, lines: tuple[str, ...], file: str = FILE) -> bool:
    """Whether it names these lines: of its two accesses, or, where ranks called different things, of each rank."""
    said = f"{finding.first} | {finding.second}"
    if re.search("not the same order|did not end", finding.text):
        said = finding.text
    places = re.split(r" \| |, rank \d+ calls", said)[-2:]
    here = re.compile(rf"{re.escape(Path(file).name)}:(\d+)")
    named = [{linecache.getline(file, int(n)) for n in here.findall(place)} for place in places]
    if len(lines) == 1:
        return any(lines[0] in line for one in named for line in one)
    return all(any(part in line for line in one) for part, one in zip(lines, named, strict=True))


def test_there_are_enough_faults_and_most_have_two_places() -> None:
    assert len(FAULTS) >= 37
    assert sum(len(fault.lines) == 2 for *_, fault in FAULTS.values()) >= 20


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_its_faults_has_no_finding(program: Any) -> None:
    ranks, faults = PROGRAMS[program]
    results = run(program, ranks, "")
    right(results)
    for finding in (finding for result in results for finding in result.findings):
        assert not any(fault.kind == finding.kind and fault.says in finding.text for fault in faults), finding
