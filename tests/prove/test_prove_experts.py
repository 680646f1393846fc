"""A proof of a model with experts is one of its balance loss and z-loss, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.nn import ExpertOptions
from isograd.prove.builtin_cases import EXPERT_LAYOUTS, LAYOUTS, LLAMA, language_model, spread_experts
from isograd.prove.builtin_cases import EXPERTS as BUILT_IN
from isograd.prove.case import Case
from isograd.prove.prove import verify
from isograd_verify.tell.findings import BUG, PASS

EXPERTS = ExpertOptions(number=4, per_token=2, width=8, balance="batch", balance_weight=0.5, z_weight=0.1)


def right(mesh: Mesh) -> Case:
    return language_model(replace(LLAMA, experts=EXPERTS), mesh)


def biased(mesh: Mesh) -> Case:
    """Its second step chooses by what the first one counted."""
    options = replace(EXPERTS, balance="none", balance_weight=0.0, choice_bias=True)
    return language_model(replace(LLAMA, experts=options), mesh)


def twice(mesh: Mesh) -> Case:
    """A layout's balance loss counts twice."""
    weight = 0.5 if mesh.layout.world_size == 1 else 1.0
    return language_model(replace(LLAMA, experts=replace(EXPERTS, balance_weight=weight)), mesh)


def test_a_run_with_experts_is_proven_under_its_largest_ep_too() -> None:
    found = {
        text: spread_experts(Layout.parse(text), 8) for text in ("dp4", "dp2 tp2 sp", "dp6 zero1", "dp3", "dp4 ep2")
    }
    assert found == {
        "dp4": ["dp4 ep4"], "dp2 tp2 sp": ["dp2 tp2 sp ep4"], "dp6 zero1": ["dp6 ep2 zero1"], "dp3": [], "dp4 ep2": [],
    }  # fmt: skip


def test_the_built_in_proof_cuts_experts_along_every_axis_and_nothing_else_by_ep() -> None:
    assert BUILT_IN.experts is not None
    layouts = [Layout.parse(text) for text in EXPERT_LAYOUTS]
    assert all(layout.ep > 1 for layout in layouts)
    assert {axis for layout in layouts for axis in ("dp", "cp", "tp", "pp") if layout.size(axis) > 1} == {
        "dp", "cp", "tp", "pp",
    }  # fmt: skip
    assert all(Layout.parse(text).ep == 1 for text in LAYOUTS)


@pytest.mark.medium
@pytest.mark.usefixtures("lent")
def test_one_device_moves_its_choice_bias_between_steps_as_the_engine_does() -> None:
    (subject,) = verify(biased, "dp2 ep2").subjects
    assert subject.verdict == PASS, subject.findings


@pytest.mark.slow
@pytest.mark.usefixtures("lent")
@pytest.mark.parametrize(("case", "verdict"), [(right, PASS), (twice, BUG)])
def test_the_balance_loss_is_proven_with_the_gradients(case, verdict) -> None:
    (subject,) = verify(case, "dp2 ep2").subjects
    assert subject.verdict == verdict, subject.findings
    assert (subject.errors["blocks.0.mlp.router.weight"] > 1e-3) == (verdict == BUG)
