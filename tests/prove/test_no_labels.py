"""Ranks that share a sequence and have no labels add nothing, alike: that is no data read twice."""

from __future__ import annotations

import pytest

from isograd.core.mesh import Mesh
from isograd.prove import builtin_cases
from isograd.prove.case import Case
from isograd.prove.prove import verify


def half_without_labels(mesh: Mesh) -> Case:
    case = builtin_cases.language_model(builtin_cases.LLAMA, mesh, rows=4)
    case.batch["labels"][2:] = -100
    return case


@pytest.mark.usefixtures("lent")
def test_a_data_rank_without_labels_passes_under_cp() -> None:
    report = verify(half_without_labels, ["dp2 cp2 ulysses"])
    assert report.ok, report
