"""Each planted fault is named, with its lines; the same program without the fault has none."""

from __future__ import annotations

import pytest

from . import run
from .programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planted_fault_is_named(name: str) -> None:
    program = PROGRAMS[name]
    results = run(program.run, program.ranks, True, seconds=program.seconds, lag=program.lag)
    found = [finding for result in results for finding in result.of(program.kind) if program.says in finding.text]
    assert found, [(r.error, [str(f) for f in r.findings]) for r in results]
    assert all("programs.py:" in finding.second for finding in found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_right_twin_of_a_fault_has_no_finding(name: str) -> None:
    program = PROGRAMS[name]
    for result in run(program.run, program.ranks, False, seconds=60, lag=program.lag):
        assert not result.error
        assert not result.faults, [str(finding) for finding in result.faults]
        assert not [f for f in result.of(program.kind) if program.says in f.text and "assert" not in f.text]
