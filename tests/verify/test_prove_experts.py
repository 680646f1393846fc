"""A proof of a model with experts is one of its balance loss and z-loss, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isograd.cases import LLAMA, language_model
from isograd.mesh import Mesh
from isograd.nn import ExpertOptions
from isograd.verify.case import Case
from isograd.verify.prove import verify
from isograd.verify.tell.findings import BUG, PASS

EXPERTS = ExpertOptions(number=4, per_token=2, width=8, balance="batch", balance_weight=0.5, z_weight=0.1)


def right(mesh: Mesh) -> Case:
    return language_model(replace(LLAMA, experts=EXPERTS), mesh)


def twice(mesh: Mesh) -> Case:
    """A layout's balance loss counts twice."""
    weight = 0.5 if mesh.layout.world_size == 1 else 1.0
    return language_model(replace(LLAMA, experts=replace(EXPERTS, balance_weight=weight)), mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "verdict"), [(right, PASS), (twice, BUG)])
def test_the_balance_loss_is_proven_with_the_gradients(case, verdict) -> None:
    (subject,) = verify(case, "dp2 ep2").subjects
    assert subject.verdict == verdict, subject.findings
    assert (subject.errors["blocks.0.mlp.router.weight"] > 1e-3) == (verdict == BUG)
