"""An exception from outside in the middle of a message: the next collective is refused, and the others are told."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import raw
from isograd.comm.launch import launch
from isograd.mesh import Mesh


class Alarm(Exception):
    """Of a signal's handler."""


def _raise(*_: Any) -> None:
    raise Alarm


def _waits(what: str) -> list[str]:
    mesh, said = Mesh("dp2"), []
    group = mesh.group("dp")
    if group.index == 0:
        time.sleep(1.0)  # rank 1 waits for it
    signal.signal(signal.SIGALRM, _raise)
    if group.index == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        if what == "a collective":
            raw.all_reduce(torch.ones(100_000), group)
        else:
            stepped(mesh)
    except (Alarm, RuntimeError) as error:
        said.append(f"{type(error).__name__}: {error}")
    try:
        raw.all_reduce(torch.ones(3), group)
    except (RuntimeError, ig.errors.IsogradError) as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def stepped(mesh: Mesh) -> None:
    model = torch.nn.Linear(3, 1)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    engine.backward(model(torch.ones(2, 3)).mean(), weight=2)
    engine.step()


@pytest.mark.parametrize("what", ["a collective", "a step"])
def test_the_next_collective_is_refused_and_the_other_rank_is_told(what: str) -> None:
    first, second = launch(_waits, 2, what, timeout=60)
    assert second[0].startswith("Alarm")
    assert "IG207" in second[1] and "Alarm came while" in second[1]
    assert first and all("Connection closed by peer" in text or "onnection" in text for text in first)
