"""A pytest plugin, registered by installing isograd-verify: a test's own training function, on ranks and watched.

@pytest.mark.isograd(ranks=2)
def test_my_training_step():
    train(steps=2)          # on each of two ranks, in one gloo group; it takes no fixtures
"""

from __future__ import annotations

import tempfile
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

USED = "@pytest.mark.isograd(ranks=2), on a function without arguments at the top level of its module"


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    config.addinivalue_line("markers", "isograd(ranks=2, steps=2): run the test on so many ranks, watched")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a marked test on ranks, and fails it with the report of a bug."""
    mark = pyfuncitem.get_closest_marker("isograd")
    if mark is None:
        return None
    if mark.args or not {"ranks", "steps"} >= set(mark.kwargs) or signature(pyfuncitem.obj).parameters:
        pytest.fail(f"expected {USED}", pytrace=False)
    report = watched(pyfuncitem.obj, **mark.kwargs)
    if report.exit_code == 3:
        pytest.fail(f"\n{report}", pytrace=False)
    return True


def watched(fn: Callable[[], Any], ranks: int = 2, steps: int = 2) -> Any:
    """The report of a function's gradients, which runs on so many new ranks."""
    from isograd_verify.io import tempdir
    from isograd_verify.record.recording import describe
    from isograd_verify.run.attach import inspect
    from isograd_verify.run.ranks import LocalRanks
    from isograd_verify.tell.report import Report

    world = LocalRanks(ranks)
    with tempfile.TemporaryDirectory(prefix="record-", dir=tempdir.home()) as place:
        home = Path(place) / "recording"
        try:
            world.run(partial(_on_rank, fn, str(home), steps), timeout=300.0)
        finally:
            world.close()
        describe(home, layout="", steps=steps)
        return Report(f"{fn.__module__}.{fn.__name__} on {ranks} ranks", [inspect(home)])


def _on_rank(fn: Callable[[], Any], home: str, steps: int) -> None:
    from isograd_verify.watch.capture import Capture

    with Capture(home, steps=steps, lenient=True):
        fn()
