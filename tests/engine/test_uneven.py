"""Data ranks run different numbers of backwards: refused on all of them, and a new engine in the same processes works.

FAILURES E18. Each of these hung, or ended in IG209, on bdb32ae.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy

import pytest

from isograd.comm import world
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import EngineError

from . import toys
from .test_transaction import Loss, truth

SEEDED = threading.Lock()  # ranks that are threads share torch's generator


def refused_then_new(layout: str, counts: tuple[int, ...], run: Callable[[Engine, Loss, int], object]) -> list[str]:
    """The codes with which uneven numbers are refused on this rank, twice, each time with a new engine."""
    rank, ranks = world.world()
    with SEEDED:
        first, expected = Loss(), truth(ranks)
    said = []
    for _ in range(2):
        model = deepcopy(first)
        engine = Engine(model, Mesh(layout), toys.sgd, bucket_mb=1e-4)
        try:
            run(engine, model, counts[rank])
            said.append("")
        except EngineError as error:
            said.append(error.code)
        model = deepcopy(first)
        engine = Engine(model, Mesh(layout), toys.sgd, bucket_mb=1e-4)
        engine.backward(*model(*toys.micro_batch(rank, 2)))
        for name, gradient in engine.grads().items():
            right = expected[name.removeprefix("toy.")]
            assert float((gradient - right).norm()) <= 1e-9 * float(right.norm()), name
        engine.step()
    return said


def own_loop(engine: Engine, model: Loss, count: int) -> None:
    for _ in range(count):
        engine.backward(*model(*toys.micro_batch(engine.mesh.rank, 2)))
    engine.step()


def train_step(engine: Engine, _: Loss, count: int) -> None:
    engine.train_step([toys.micro_batch(engine.mesh.rank, 2 + 2 * number) for number in range(count)])


CASES = [
    # Rank 1 hears in a further backward that rank 0 is at its step, and comes to that gather.
    pytest.param("dp2 zero1", (2, 5), own_loop, id="a backward of one's own loop"),
    pytest.param("dp4 zero0", (2, 5, 4, 6), own_loop, id="four ranks"),
    # Rank 0 hears in `step` that rank 1 is in a further forward. In the own loop neither comes to a gather, and rank
    # 0's reductions never meet those of the next engine.
    pytest.param("dp2 zero3", (1, 3), own_loop, id="zero3, a forward of one's own loop"),
    pytest.param("dp2 zero3", (1, 3), train_step, id="train_step, in a forward"),
    # Rank 0's first backward reduces gradients, rank 1's does not.
    pytest.param("dp2 zero3", (1, 2), train_step, id="train_step, in the first backward"),
]


def check(codes: list[list[str]]) -> None:
    assert all(code in ("IG550", "IG554", "IG571", "IG572") for said in codes for code in said), codes


@pytest.mark.medium
@pytest.mark.parametrize(("layout", "counts", "run"), CASES)
def test_uneven_backwards_are_refused_and_a_new_engine_works(
    threads, layout: str, counts: tuple[int, ...], run: Callable[[Engine, Loss, int], object]
) -> None:
    check(threads(len(counts)).run(refused_then_new, layout, counts, run, timeout=25))


@pytest.mark.medium
@pytest.mark.parametrize(("layout", "counts", "run"), [CASES[0], CASES[3]])
def test_uneven_backwards_over_gloo(worlds, layout: str, counts: tuple[int, ...], run: Callable[..., object]) -> None:
    check(worlds(2).run(refused_then_new, layout, counts, run, timeout=25))
