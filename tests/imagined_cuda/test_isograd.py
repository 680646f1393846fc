"""isograd's own training on imagined cards: the gradients of one device, and no fault, on any stream.

The model, the data, the truth and the comparison are those of the parity grid (tests/parity/cases.py), in fp64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.parity import cases

from .on_cards import values

LAYOUTS = (
    "dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2", "dp2 tp2 zero1", "pp2", "pp4",
)  # fmt: skip


SLOW = ("cp2 ring", "pp2 gpipe", "pp2 zb", "pp2 vpp2", "tp2 cp2", "dp2 pp2 zero1", "dp2 tp2 zero3")


def trained(layout: str, stream: str, **how: Any) -> list[cases.Trained]:
    """As the parity grid does, on each rank's card. On a stream of the user's: everything, the model included."""
    from isograd import Layout

    return values(Layout.parse(layout).world_size, stream, partial(cases.train, layout, model_of(layout), 2, **how))


def model_of(layout: str) -> str:
    return "deep" if "pp" in layout else "llama"


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_one_devices_and_nothing_races(layout: str, stream: str) -> None:
    of_one_device(layout, trained(layout, stream))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_the_rest_of_the_covering_set_does_not_race_on_a_stream_of_the_users(layout: str) -> None:
    of_one_device(layout, trained(layout, "own"))


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("dp2 zero3", True),
        pytest.param("tp2 sp", "selective", marks=pytest.mark.slow),
        pytest.param("pp2", True, marks=pytest.mark.slow),
    ],
)
def test_recomputed_blocks_give_the_gradients_of_one_device(layout: str, how: bool | str) -> None:
    of_one_device(layout, trained(layout, "default" if "zero" in layout else "own", recompute=how))


@pytest.mark.parametrize(("layout", "stream"), [("dp2", "default"), ("dp2 zero3", "own")])
def test_inputs_of_blocks_that_are_kept_on_the_host_give_the_gradients_of_one_device(layout: str, stream: str) -> None:
    of_one_device(layout, trained(layout, stream, recompute="offload"))


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_masters_that_are_offloaded_lie_and_step_in_the_hosts_memory(layout: str) -> None:
    of_one_device(layout, trained(layout, "default", offload=True), "cpu")


def of_one_device(layout: str, found: list[cases.Trained], masters: str = "cuda") -> None:
    """Gradients, losses, norms and parameters are those of one device, and masters lie where they should."""
    truth = cases.one_device(model_of(layout), 2 * (2 if "dp2" in layout else 1))
    assert all(one.stepped == {masters} for one in found)
    found[0].parameters = {name: value for one in found for name, value in one.parameters.items()}
    assert not cases.differences(found[0], truth)
