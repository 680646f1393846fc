"""Experts, contrastive losses, checkpoints, copies of states on imagined cards: all as on one device, without a race.

The programs, their data and their truths are those of the tests on gloo, in fp64, at 1e-9.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from isograd.checkpoint import CheckpointManager
from isograd.core.layout import Layout
from tests.checkpoint import toys
from tests.elastic import test_copies
from tests.engine import test_corruption
from tests.losses.contrastive import test_experts as contrastive_experts
from tests.losses.contrastive import test_matrix as contrastive
from tests.losses.contrastive.toys import assert_same
from tests.parity import sparse

from . import rank, world
from .on_cards import some, values
from .test_regressions import trains_on

EXPERTS = some(
    ("dp2 ep2", 1, "two", "sequence", "default"),
    ("dp2 ep2", 3, "sigmoid, dense first", "lagged", "own"),
    ("tp2 sp ep2", 0, "one, shared", "batch", "own"),
    slow=(
        ("dp2 ep2", 0, "tight", "batch", "own"),
        ("dp2 ep2", 2, "one, shared", "sequence", "own"),
        ("dp2 ep2", 3, "two", "batch", "default"),
        ("tp2 sp ep2", 1, "sigmoid, dense first", "sequence", "default"),
        ("tp2", 1, "tight", "lagged", "own"),
        ("pp2", 1, "two", "batch", "own"),
        ("cp2 ulysses ep2", 1, "two", "sequence", "own"),
        ("dp2 cp2 ring ep2", 0, "one, shared", "batch", "own"),
        ("dp2 tp2 sp ep4", 3, "sigmoid, dense first", "batch", "own"),
        ("pp2 vpp2 dp2 ep2", 1, "tight", "batch", "own"),
    ),
)


@pytest.mark.parametrize(("layout", "zero", "kind", "scope", "stream"), EXPERTS)
def test_experts_train_as_on_one_device(layout: str, zero: int, kind: str, scope: str, stream: str) -> None:
    """Gradients, parameters, losses, norms, each term, the experts' counts and the bias of their choice."""
    case = sparse.Case(layout, zero, kind, scope, accumulation=2, recompute=stream == "own", idle=kind[0] == "s")
    assert not case.wrong(values(Layout.parse(layout).world_size, stream, case.run))


CONTRASTIVE = some(
    ("dp2 zero1", "both ways, ring, guide", "own"),
    ("dp2 zero3", "one way", "own"),
    slow=(
        ("dp2 zero1", "sigmoid, ring", "default"),
        ("dp2 zero3", "both ways, ids", "default"),
        ("dp2 zero2", "own function", "own"),
        ("cp2 ulysses", "relative margin", "own"),
        ("tp2 sp zero1", "sigmoid", "own"),
        ("dp2 cp2 ring zero3", "both ways, ring, guide", "own"),
    ),
)


@pytest.mark.parametrize(("layout", "loss", "stream"), CONTRASTIVE)
def test_contrastive_gradients_are_those_of_the_full_batch(layout: str, loss: str, stream: str) -> None:
    case = {"layout": layout, "loss": loss, "chunk": 2, "keep_mb": 0.03, "tied": stream == "own", "negatives": 2}
    case |= {"dropout": 0.2, "rows": "uneven"}
    _, more = contrastive.arguments(case)
    for (found,) in values(Layout.parse(layout).world_size, stream, contrastive.run, [case]):
        assert_same(found, contrastive.expected(Layout.parse(layout).dp, loss=loss, **more), layout, 1e-9)


@pytest.mark.parametrize("layout", [pytest.param("dp2 ep2", marks=pytest.mark.slow)])
def test_contrastive_gradients_of_experts_are_those_of_the_full_batch(layout: str) -> None:
    true, _ = contrastive_experts.one_device(2, "uneven")
    for found, _ in values(2, "own", contrastive_experts.cached, layout, "uneven"):
        assert_same(found, true, layout, 1e-9)


SAVED, STOP = 2, 4  # steps


def saved_beside_training(folder: Path, layout: str, options: dict[str, Any]) -> toys.Run:
    """The files are half written when the next steps change all that was copied, and whole only after them."""
    engine, trained = toys.engine_of(layout, **options), Event()

    def phase(now: str) -> None:
        assert now != "half written" or trained.wait(30)

    with CheckpointManager(folder, engine, phase=phase) as keeper:
        run = toys.train(engine, 0, SAVED)
        keeper.save(SAVED)
        toys.train(engine, SAVED, STOP, run)
        trained.set()
    return run


def resumed(folder: Path, layout: str, options: dict[str, Any]) -> toys.Run:
    return toys.resume(folder, layout, STOP, **options)


def is_one_devices(found: toys.Run, truth: toys.Run) -> None:
    for ours, theirs in zip(found.gradients, truth.gradients[found.start :], strict=True):
        whole = torch.stack([g.norm() for g in theirs.values()]).norm()
        assert ours.keys() <= theirs.keys()
        for name, gradient in ours.items():
            assert (gradient - theirs[name]).norm() <= 1e-9 * max(theirs[name].norm(), 1e-6 * whole), name
    assert found.losses == pytest.approx(truth.losses[found.start :], rel=1e-9)
    assert found.norms == pytest.approx(truth.norms[found.start :], rel=1e-9)


CHECKPOINTS = some(
    ("dp2 zero3", "dp2 zero1", "default", {}),
    ("dp2 zero1", "tp2 sp", "own", {}),
    slow=(
        ("tp2", "dp2 zero3", "own", {}),
        ("dp2", "pp2", "own", {}),
        ("dp2 zero3", "dp2 zero2", "own", {"offload": True}),
        ("dp2 ep2 zero1", "dp2 zero3", "own", {"model": "experts"}),
        ("dp2 zero1", "dp2 ep2 zero3", "default", {"model": "experts"}),
    ),
)


@pytest.mark.parametrize(("saved", "loaded", "stream", "options"), CHECKPOINTS)
def test_a_checkpoint_holds_its_own_step_whatever_is_trained_beside_it(
    tmp_path: Path, saved: str, loaded: str, stream: str, options: dict[str, Any]
) -> None:
    """Saved on cards, and loaded on cards under another layout and on the CPU: gradients, losses, norms of the rest."""
    plain = {name: value for name, value in options.items() if name == "model"}
    truth = toys.train(toys.engine_of("1", **plain), 0, STOP)
    for run_ in values(2, stream, saved_beside_training, tmp_path, saved, options):
        is_one_devices(run_, truth)
    for run_ in (*values(2, stream, resumed, tmp_path, loaded, options), resumed(tmp_path, "1", plain)):
        assert run_.start == SAVED
        is_one_devices(run_, truth)


def replayed() -> str:
    """A checked step of a model that draws from its card's generator alone."""
    engine = toys.engine_of("dp2", dtype=torch.float32)
    engine.model.register_forward_pre_hook(lambda *_: [torch.rand(1, device="cuda")].clear())
    return test_corruption.checked_step(engine, 0)


def test_a_replay_refuses_a_model_that_draws_on_its_card() -> None:
    for said in values(2, "default", replayed):
        assert said.startswith("IG582") and "draws random numbers" in said, said


@pytest.mark.slow
def test_ranks_that_are_processes_of_their_own_load_their_cards(tmp_path: Path) -> None:
    """As on real cards ("spawn"), where nobody forks a process that has used one."""
    job = rank.Job(pickle.dumps((trains_on, (True,))), 2, tmp_path, join=False)
    rank.start_ranks(job, "spawn")
    results = [world.result_of(job, number) for number in range(2)]
    assert [result.value for result in results] == [("cuda:0", "GPU-0", 2.0), ("cuda:1", "GPU-1", 2.0)], results


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_a_partner_on_another_machine_holds_what_its_owner_holds(tmp_path: Path, layout: str) -> None:
    """Copies leave host memory by gloo, beside NCCL."""
    for found in values(2, "default", test_copies.steps, layout, layout, True, tmp_path):
        assert found["held"] == {0: [4, 3], 1: [4, 3]}
        assert found["same"] and found["loaded"] and not found["damaged"]
        assert all(len(messages) == 1 for messages in found["sent"][1:])
