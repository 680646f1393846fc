"""ZeRO 3 when a step does not go as planned: every data rank gets an error that names ranks and blocks, or the right
gradient afterwards. Nothing hangs, and nothing is left whole.

FAILURES A8 (ranks that skip different blocks) and A9 (a SIGSEGV); forwards and backwards that raise on one rank or on
all of them, in random sequences with evaluations and recomputation, against plain torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.engine.zero3.param_group import GroupState, Zero3Hooks
from isograd.errors import EngineError

from . import toys
from .test_units import Block, Chain, loss_of, memory


class Stumbled(Exception):
    """What a user's own code raises."""


class Trap(Block):
    """A block that raises on request."""

    fails = ""  # "forward" or "backward"

    def forward(self, x: Tensor) -> Any:
        if self.fails == "forward":
            raise Stumbled("in forward\nwith a second line")
        wrapped = super().forward(x)
        if self.fails == "backward" and wrapped.stream.requires_grad:
            wrapped.stream.register_hook(_stumble)
        return wrapped


def _stumble(_: Tensor) -> None:
    raise Stumbled("in backward")


class Trapped(Chain):
    """Three blocks of equal size: rows of one would fit into another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Trap(33) for _ in range(3)).double()

    @contextmanager
    def trap(self, block: int, fails: str) -> Iterator[None]:
        self.blocks[block].fails = fails
        try:
            yield
        finally:
            self.blocks[block].fails = ""


def outcome(run: Any) -> str:
    """The first lines of what it raised; '' when it did not."""
    try:
        run()
    except (EngineError, Stumbled) as error:
        return str(error)
    return ""


def is_clean(engine: Engine) -> bool:
    """Whether nothing of the model is whole, and nothing is under way."""
    zero3 = engine._zero3
    assert isinstance(zero3, Zero3Hooks)
    groups = [group for group in zero3.groups if group.awaited or group.state is not GroupState.SHARDED]
    state = (zero3._run.phase, zero3._pending, groups)
    return not any(memory(engine)) and not any(state)


# -- A8: different blocks ----------------------------------------------------------------------------------------


def skipping(known: bool) -> tuple[str, bool, dict[str, Tensor]]:
    """Ranks skip different blocks; `known`: after a step in which they did not. Then one batch that goes as planned."""
    mesh, model = Mesh("dp2 zero3"), Trapped()
    engine = Engine(model, mesh, toys.sgd)
    if known:
        engine.backward(*loss_of(model, 0, mesh.rank + 2))
        engine.step()
    own_order = (0, 1) if mesh.rank == 0 else (0, 2)
    said = outcome(lambda: engine.backward(*loss_of(model, 0, mesh.rank + 2, own_order)))
    clean = is_clean(engine)
    engine.discard()
    engine.backward(*loss_of(model, 1, mesh.rank + 2))
    return said, clean, {name: g.clone() for name, g in engine.grads().items()}


def test_ranks_that_skip_different_blocks_are_told_which(worlds) -> None:
    """FAILURES A8: gradients were 103 % off, without a word."""
    for known in (False, True):
        found = worlds(2).run(skipping, known)
        for said, clean, _ in found:
            assert "IG572" in said
            assert "rank 0 gathers block 'blocks.1'" in said
            assert f"rank 1 gathers block 'blocks.{0 if known else 2}'" in said  # the last one known stays whole
            assert clean
        if not known:  # no step was taken before: the parameters are the first ones
            truth = gradients_of_one_device()
            for _, _, gradients in found:
                assert_close(gradients, truth)


def gradients_of_one_device() -> dict[str, Tensor]:
    model, rows = Trapped(), 0
    for index in (2, 3):
        loss, weight = loss_of(model, 1, index)
        (loss * weight).backward()
        rows += weight
    return {n: p.grad / rows for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, value in truth.items():
        assert float((found[name] - value).norm()) <= 1e-9 * float(value.norm()), name


# -- exceptions --------------------------------------------------------------------------------------------------


def expected_of(rank: int, failing: tuple[int, ...], phase: str) -> list[str]:
    if rank in failing:
        return [f"in {phase}"]
    return ["IG571", "an exception on rank", *(f"rank {r} failed in {phase}: Stumbled: in {phase}" for r in failing)]


def unlike(engine: Engine, plain: nn.Module) -> list[str]:
    """Parameters whose gradient is not that of one device."""
    truth = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    found = []
    for name, gradient in engine.grads().items():
        value = truth.get(name, torch.zeros_like(gradient))
        if not float((gradient - value).norm()) <= 1e-9 * float(value.norm()):
            found.append(name)
    return found


def sequence(seed: int) -> list[str]:
    """A random sequence of what may happen to an engine at ZeRO 3, beside plain torch; what was wrong."""
    draw = random.Random(seed)
    mesh, model, plain = Mesh("dp2 zero3"), Trapped(), Trapped()
    engine = Engine(model, mesh, toys.sgd, bucket_mb=0.01, keep_gathered=draw.random() < 0.3)
    stepper = toys.sgd([p for p in plain.parameters() if p.requires_grad])
    problems: list[str] = []
    weight = 0

    def forget() -> int:
        engine.discard()
        stepper.zero_grad()
        return 0

    for number in range(6):
        action = draw.choice(("train", "train", "evaluate", "throw away", "forward", "backward"))
        order = tuple(draw.sample(range(3), draw.randint(1, 3)))
        model.reentrant = draw.choice((None, None, False, True))
        where = f"seed {seed}, action {number}: {action}"
        if action == "train":
            with engine.no_sync() if draw.random() < 0.5 else nullcontext():
                engine.backward(*loss_of(model, number, mesh.rank + 2, order))
            for rank in range(2):
                loss, rows = loss_of(plain, number, rank + 2, order)
                (loss * rows).backward()
                weight += rows
        elif action == "evaluate":
            with torch.no_grad():
                found, truth = loss_of(model, number, 2, order)[0], loss_of(plain, number, 2, order)[0]
            if abs(float(found - truth)) > 1e-9 * float(truth):
                problems.append(f"{where}: loss {float(found)} for {float(truth)}")
        elif action == "throw away":
            loss_of(model, number, 2, order)
        else:
            failing = draw.choice(((0,), (1,), (0, 1)))
            block = draw.choice(order)
            for _ in range(draw.randint(1, 2)):
                trap = model.trap(block, action) if mesh.rank in failing else nullcontext()
                with trap:
                    said = outcome(lambda: engine.backward(*loss_of(model, number, mesh.rank + 2, order)))
                missing = [part for part in expected_of(mesh.rank, failing, action) if part not in said]
                if missing or not is_clean(engine):
                    problems.append(f"{where}: {missing} missing in {said!r}, clean: {is_clean(engine)}")
                weight = forget()
        if weight and draw.random() < 0.5:
            for parameter in plain.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / weight
            problems += [f"{where}: gradient of {name}" for name in unlike(engine, plain)]
            engine.step()
            stepper.step()
            weight = forget()
    return problems


def sequences(seeds: range) -> list[str]:
    return [problem for seed in seeds for problem in sequence(seed)]


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_random_sequences_of_failures_leave_the_gradients_of_one_device(worlds, count: int) -> None:
    assert worlds(2).run(sequences, range(count)) == [[], []]


def partly(failing: int, block: int) -> str:
    """Three ranks, of which one raises: the two others gather the same block from each other."""
    mesh, model = Mesh("dp3 zero3"), Trapped()
    engine = Engine(model, mesh, toys.sgd)
    with model.trap(block, "forward") if mesh.rank == failing else nullcontext():
        said = outcome(lambda: engine.backward(*loss_of(model, 0, mesh.rank)))
    assert is_clean(engine)
    loss, rows = loss_of(model, 1, mesh.rank + 2)
    engine.backward(loss, weight=rows)
    engine.step()
    return said


def test_of_three_ranks_two_learn_what_happened_to_the_third(worlds) -> None:
    said = worlds(3).run(partly, 2, 1)
    assert said[2].startswith("in forward")
    assert all("rank 2 failed in forward: Stumbled: in forward" in words for words in said[:2])


# -- two engines, one process ------------------------------------------------------------------------------------


def two_engines() -> list[bool]:
    """Their steps are interleaved, and one of them fails on one rank: the other one goes on."""
    mesh = Mesh("dp2 zero3")
    models = Trapped(), Trapped()
    engines = [Engine(model, mesh, toys.sgd) for model in models]
    losses = [loss_of(model, 0, mesh.rank + 2) for model in models]
    with models[0].trap(1, "forward") if mesh.rank else nullcontext():
        said = outcome(lambda: engines[0].backward(*loss_of(models[0], 0, 2)))
    engines[0].discard()
    engines[1].backward(*losses[1])
    engines[0].backward(*loss_of(models[0], 0, mesh.rank + 2))
    gradients = [{n: g.clone() for n, g in engine.grads().items()} for engine in engines]
    return [bool(said), all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items()), is_clean(engines[0])]


def test_two_engines_in_one_process_fail_each_for_itself(worlds) -> None:
    assert worlds(2).run(two_engines) == [[True] * 3] * 2


# -- reading at the wrong time -----------------------------------------------------------------------------------


class Aside(nn.Module):
    """A block whose output has no gradient; what it puts aside has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 13).double()
        self.aside = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(torch.tanh(self.linear(x)))
        self.aside = hidden.square().mean()
        return hidden.detach()


def put_aside() -> list[str]:
    mesh, model = Mesh("dp2 zero3"), nn.ModuleDict({"blocks": nn.ModuleList(Aside() for _ in range(2))})
    engine = Engine(model, mesh, toys.sgd)
    for block in model["blocks"]:
        block(torch.ones(3, 13, dtype=torch.float64))
    try:
        engine.backward(model["blocks"][0].aside, weight=1)
    except RuntimeError as error:
        return [str(error), *error.__notes__]
    return []


def test_a_backward_that_reads_what_was_given_back_raises_and_does_not_crash(worlds) -> None:
    """FAILURES A9: memory that autograd had saved was read after it was freed, a SIGSEGV."""
    for error, note in worlds(2).run(put_aside):
        assert "modified by an inplace operation" in error
        assert "ZeRO 3: a backward read a parameter after its block was given back" in note


# -- A17: different numbers --------------------------------------------------------------------------------------


def unequal_numbers() -> tuple[str, str]:
    """One rank has three micro-batches, the other one; everything is sent at the step."""
    mesh, model = Mesh("dp2 zero3"), Trapped()
    engine = Engine(model, mesh, toys.sgd, overlap=False)

    def run() -> None:
        for index in range(3 if mesh.rank else 1):
            engine.backward(*loss_of(model, 0, 2 + index))
        engine.step()

    first = outcome(run)
    engine.discard()
    engine.backward(*loss_of(model, 0, mesh.rank + 2))
    return first, outcome(engine.step)


class EndsBadly(Chain):
    """Raises when all blocks have run."""

    fails = False

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
        output = super().forward(x, order)
        if self.fails:
            raise KeyError("stumbled")
        return output


def without_discard() -> list[str]:
    """Rank 1 fails at the end of a forward, which rank 0 hears in its backward; both go on without `discard`."""
    mesh, model = Mesh("dp2 zero3"), EndsBadly()
    engine = Engine(model, mesh, toys.sgd)
    said = []
    for attempt in range(2):
        model.fails = not attempt and mesh.rank == 1
        try:
            engine.backward(*loss_of(model, 0, mesh.rank))
        except (KeyError, EngineError) as error:
            said.append(str(error))
            if attempt:
                engine.discard()
    engine.backward(*loss_of(model, 0, mesh.rank))
    return [*said, str({name: float(g.sum()) for name, g in engine.grads().items()})]


def test_a_rank_that_refuses_a_backward_leaves_no_other_one_waiting(worlds) -> None:
    first, second = worlds(2).run(without_discard)
    assert "IG571" in first[0] and "stumbled" in first[0]
    assert "stumbled" in second[0]
    assert "IG550" in first[1]
    assert "IG571" in second[1] and "an earlier one had failed" in second[1]
    assert first[2] == second[2]


def test_unequal_numbers_of_forwards_are_named(worlds) -> None:
    """FAILURES A17: this was a SIGABRT."""
    for first, then in worlds(2).run(unequal_numbers):
        assert "IG572" in first
        assert "rank 0 " in first
        assert "rank 1 gathers what is outside of all blocks in forward" in first
        assert not then


def edited() -> list[str]:
    """One element of a parameter that is sharded is written: what this rank is told, and whether the edit counts where
    the parameter is whole."""
    mesh, model = Mesh("dp2 zero3"), torch.nn.Linear(4, 1)
    engine = Engine(model, mesh, toys.sgd)
    with engine.full_parameters(), torch.no_grad():
        model.weight[0, 0] = 3.0
    with engine.full_parameters():
        said = [str(float(model.weight[0, 0]))]
    with torch.no_grad():
        model.weight[0, 0] = 5.0
    try:
        model(torch.ones(2, 4))
    except EngineError as error:
        said.append(str(error))
    return said


def test_an_element_that_is_written_while_its_parameter_is_sharded_is_refused(worlds) -> None:
    """It went into the one number that stands for the whole parameter, and was lost."""
    for value, refusal in worlds(2).run(edited):
        assert value == "3.0"
        assert "IG517" in refusal and "edited while sharded" in refusal and "'weight'" in refusal
