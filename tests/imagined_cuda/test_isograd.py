"""isograd's own training on imagined cards: the gradients of one device, and no fault, on any stream.

The model, the data, the truth and the comparison are those of the parity grid (tests/parity/cases.py), in fp64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from isograd.core.layout import Layout
from tests.parity import cases

from .on_cards import some, values

LAYOUTS = (
    "dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2", "dp2 tp2 zero1", "pp2", "pp4",
)  # fmt: skip
SLOW = ("cp2 ring", "pp2 gpipe", "pp2 zb", "pp2 vpp2", "tp2 cp2", "dp2 pp2 zero1", "dp2 tp2 zero3")


def trains(layout: str, stream: str, **how: Any) -> None:
    """As the parity grid does, on each rank's card. On a stream of the user's: everything, the model included."""
    case = cases.Case(layout, "deep" if "pp" in layout else "llama", 2)
    found = values(Layout.parse(layout).world_size, stream, partial(cases.train, layout, case.model, 2, **how))
    assert not case.wrong(found)
    assert all(one.stepped == {"cpu" if how.get("offload") else "cuda"} for one in found)


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_one_devices_and_nothing_races(layout: str, stream: str) -> None:
    trains(layout, stream)


REST = some(
    ("dp2 zero3", "default", {"recompute": True}),
    ("dp2", "default", {"recompute": "offload"}),
    ("dp2 zero3", "own", {"recompute": "offload"}),
    slow=(
        *((layout, "own", {}) for layout in SLOW),
        ("tp2 sp", "own", {"recompute": "selective"}),
        ("pp2", "own", {"recompute": True}),
    ),
)


@pytest.mark.parametrize(("layout", "stream", "how"), REST)
def test_other_layouts_and_recomputed_blocks_have_the_gradients_of_one_device(
    layout: str, stream: str, how: dict[str, Any]
) -> None:
    """Also where the inputs of blocks are kept in the host's memory."""
    trains(layout, stream, **how)


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_masters_that_are_offloaded_lie_and_step_in_the_hosts_memory(layout: str) -> None:
    trains(layout, "default", offload=True)
