"""What all ranks decide is a function of the rows that they have gathered: no process is needed to try it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.engine import step_status
from isograd.engine.gathered import GatheredStep
from isograd.engine.step import StepState
from isograd.engine.step_status import Status, StepStatus
from isograd.engine.term_weights import TermWeights
from isograd.errors import EngineError


def fine(ranks: int) -> StepStatus:
    ones = torch.ones(ranks, dtype=torch.float64)
    return StepStatus(
        ones * 8, ones * 2.5, ones * 0, ones * Status.FINE, ones, ones * 7, ones * 0,
        {"losses": torch.zeros(ranks, 2)}, ones.bool()[:, None],
    )  # fmt: skip


def changed(column: str, *values: float) -> StepStatus:
    """The column of four ranks."""
    return replace(fine(4), **{column: torch.tensor(values, dtype=torch.float64)})


LAYOUTS = ("dp4", "dp2 tp2", "tp2 pp2", "dp2 pp2 zero1", "cp2 ring dp2")
CASES: dict[str, tuple[StepStatus, dict[str, str]]] = {
    "fine": (fine(4), {}),
    "a negative weight": (changed("weight", 8, -1, -1, 8), dict.fromkeys(LAYOUTS, "IG515")),
    "no weight on a rank": (changed("weight", 8, 8, 0, 0), {}),
    "NaN": (changed("weight", 8, 8, 8, torch.nan), dict.fromkeys(LAYOUTS, "IG515")),
    "unlike weights of neighbours": (changed("weight", 8, 4, 8, 8), {"dp2 tp2": "IG516", "tp2 pp2": "IG516"}),
    "unlike losses of neighbours": (changed("loss", 2.5, 2.4, 2.5, 2.5), {"dp2 tp2": "IG547", "tp2 pp2": "IG547"}),
    "losses that round otherwise": (changed("loss", 2.5, 2.5001, 2.5, 2.5), {}),
    "other settings of one half": (changed("settings", 7, 7, 5, 5),
                                   {layout: "IG548" for layout in LAYOUTS if "pp2" not in layout}),
    "other settings of a neighbour": (changed("settings", 7, 5, 7, 5), dict.fromkeys(LAYOUTS, "IG548")),
    "fewer backwards of one half": (changed("synced_backwards", 1, 1, 2, 2),
                                    {layout: "IG554" for layout in LAYOUTS if "pp2" not in layout}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_step_is_refused_by_what_its_ranks_have_in_common(layout: str, case: str) -> None:
    status, expected = CASES[case]
    codes = set()
    for rank in range(4):  # every rank decides alike
        try:
            step_status.refuse_wrong(status, Mesh.unbound(layout, rank))
            codes.add("")
        except EngineError as error:
            codes.add(error.code)
    assert codes == {expected.get(layout, "")}


class Counts:
    """As much of a StepState as the refusal of unequal steps looks at."""

    optimizer_inconsistent = StepState.optimizer_inconsistent
    mark_inconsistent, change = StepState.mark_inconsistent, StepState.change
    mesh = Mesh.unbound("dp4", 0)

    def __init__(self) -> None:
        self._placeholders: dict[object, object] = {}
        self.now = GatheredStep(TermWeights(self.mesh))


@pytest.mark.parametrize(
    ("steps", "status", "code"),
    [((3, 3, 3, 3), Status.FINE, ""), ((3, 3, 2, 3), Status.FINE, "IG559"), ((3, 3, 2, 3), Status.INCONSISTENT, "")],
)
def test_copies_whose_optimizers_have_stepped_unequally_often_are_refused(steps, status: Status, code: str) -> None:
    """A rank that says what raised is named by another refusal."""
    table = replace(changed("status", *[status] * 4), more={"steps": torch.tensor(steps)[:, None]})
    step_state, said = Counts(), ""
    try:
        step_status.refuse_parted(table, step_state)  # type: ignore[arg-type]
    except EngineError as error:
        said = error.code
    assert said == code
    assert (step_state.optimizer_inconsistent is not None) == bool(code)
    step_status.refuse_parted(fine(4), step_state)  # type: ignore[arg-type]  # an Engine's optimizer steps in its own step


@pytest.mark.parametrize("width", [1, 47, 48, 49, 200])
def test_flags_cross_the_wire_as_whole_numbers(width: int) -> None:
    flags: Tensor = torch.rand(width, generator=torch.Generator().manual_seed(width)) < 0.5
    again = step_status.unpacked(step_status.packed(flags.tolist(), 200)[None], 200)
    assert torch.equal(again[0, :width], flags)
    assert not again[0, width:].any()
