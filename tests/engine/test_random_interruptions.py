"""An exception at any point of one rank's step: every later step is right on all ranks, or refused on all within ten
seconds.

A point is named by the state of the step, the kind of call or message, and which one of that kind it is: a profile
function of the rank's thread sees each. One rank raises there, in a round of `train_step`, `evaluate` and `save`. Then
it discards, goes on, or tries again, and all ranks take further steps and save. Losses, norms, weights and the
checkpoint are compared with one device that takes the steps that were taken.

    python -m tests.engine.test_random_interruptions 4400            # by hand: prints state x kind x layout; each of
                                                                     # ten states twenty times under each of 22 layouts
    python -m tests.engine.test_random_interruptions 20 100 gloo     # seeds 100 to 119, all on gloo
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.checkpoint import CheckpointManager
from isograd.comm import threads
from isograd.comm import world as comm_world
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine.gathered import State
from isograd.launcher.launch import World
from isograd.nn import ExpertOptions

SOURCE = str(Path(ig.__file__).parent) + "/"
STEPS, VICTIM_STEP, ANSWER_S, HANG_S = 5, 1, 10.0, 25.0
LAYOUTS = (
    "dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2 ring", "cp2 ulysses", "pp2", "pp2 zb",
    "dp2 ep2", "dp2 tp2 sp zero1", "dp2 tp2 zero3", "dp2 pp2 zero1", "dp2 pp2 zero3", "dp2 cp2 ring zero3",
    "dp2 cp2 ulysses zero2", "cp2 ring tp2", "tp2 pp2", "cp2 ulysses pp2 zb", "dp4 ep2 zero1", "dp2 ep2 zero3",
)  # fmt: skip
KINDS = (KeyboardInterrupt, RuntimeError, TimeoutError, MemoryError, torch.OutOfMemoryError)
AFTER = ("discard", "nothing", "retry")
# What the functions on the stack say of the state of a step; the first line that one of them fits.
STATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # files, functions ((): all of them)
    "save": (("checkpoint/manager.py",), ()),
    "evaluate": (("engine/engine.py",), ("evaluate",)),
    "drop": (("engine/step.py", "engine/engine.py"), ("abandon", "discard")),
    "gathers": (("engine/zero.py",), ("_gather",)),
    "optimizer": (("engine/zero.py",), ("step",)),
    "status gather": (("engine/engine.py",), ("_gather_step_status",)),
    "reductions": (("engine/step.py",), ("finish_reductions",)),
    "backward": (("engine/step.py", "pipeline/run.py"), ("run_backward", "begin", "end", "_backward", "_weights")),
    "forward": (("engine/batches.py", "pipeline/run.py"), ("call", "_forward")),
    "step": (("engine/engine.py",), ("step",)),
}
MESSAGES = ("exchange", "send_start", "receive_start", "broadcast_", "barrier")  # of comm/raw.py
WAITS = ("wait", "wait_for")  # of a Handle
Point = tuple[str, str, int]  # state, kind, which of them
Parts = dict[str, tuple[tuple[slice, ...], Tensor]]


class Found(NamedTuple):
    """What a rank tells at its end."""

    taken: tuple[tuple[int, float, float], ...]  # step, loss, norm
    last: Parts  # my part of each parameter, after the last step that was taken
    final: Parts | None  # at the end; None where no step is taken any more
    saved: int | None  # how many steps had been taken when the last save reached the disk
    points: Counter[tuple[str, str]]
    hit: float | None  # when the exception came
    ended: float
    said: tuple[str, ...]


class Raises:
    """A profile function: counts the points that a rank passes, and raises at one of them."""

    def __init__(self, point: Point | None, error: BaseException) -> None:
        self.point, self.error = point, error
        self.points: Counter[tuple[str, str]] = Counter()
        self.hit: float | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(SOURCE) or name.endswith("threads.py"):
            return
        kind = _kind(frame, event, name[len(SOURCE) :])
        if kind is None:
            return
        at = _state(frame), kind
        self.points[at] += 1
        if self.point is not None and self.point == (*at, self.points[at]):
            sys.setprofile(None)
            self.hit = time.monotonic()
            raise self.error


def _kind(frame: FrameType, event: str, file: str) -> str | None:
    """A message by its purpose and what is done with it, before and after; or any other call."""
    function, group = frame.f_code.co_name, None
    if file == "comm/raw.py" and function in MESSAGES:
        group = frame.f_locals["group"]
    elif file == "comm/handle.py" and function in WAITS:
        group = frame.f_locals["self"].group
    if group is None:
        return "call" if event == "call" else None
    caller, purpose = frame.f_back, group.purpose or group.axes
    while caller is not None and caller.f_code.co_filename.startswith(SOURCE + "comm/"):
        caller = caller.f_back
    if caller is not None and caller.f_code.co_filename.endswith("gather_check.py"):
        purpose = "notes"
    verb = "wait" if function in WAITS else function.removesuffix("_start").strip("_")
    return f"{purpose}: {'' if event == 'call' else 'after '}{verb}"


def _state(frame: FrameType | None) -> str:
    stack = set()
    while frame is not None and frame.f_code is not trained.__code__:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE):
            stack.add((name[len(SOURCE) :], frame.f_code.co_name))
        frame = frame.f_back
    for state, (files, functions) in STATES.items():
        if any(file in files and (not functions or function in functions) for file, function in stack):
            return state
    return "between"


def batch(step: int, mesh: Mesh) -> dict[str, Tensor]:
    tokens = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[0, : 1 + step % 4] = -100  # uneven
    rows = 4 // mesh.size("dp")
    here = slice(mesh.index("dp") * rows, (mesh.index("dp") + 1) * rows)
    return {"tokens": tokens[here], "labels": labels[here]}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def decoder(mesh: Mesh, experts: bool) -> ig.Engine:
    options = ExpertOptions(number=4, per_token=2, width=8, balance="none") if experts else None
    config = ig.models.TransformerConfig(vocab=17, hidden=16, layers=2, heads=2, mlp=12, experts=options)
    model = ig.models.Transformer(config, mesh, seed=1).double()
    return ig.Engine(model, mesh, sgd, bucket_mb=1e-3)


def parts(engine: ig.Engine) -> Parts:
    """What this rank keeps of each parameter, and where that lies in the whole one."""
    found = {}
    for slot in engine.plan.slots:
        mine, box = engine.local_shard(slot.name).detach().clone(), slot.contract.local(engine.mesh)
        if engine.mesh.layout.zero == 3:
            first = box[0][0]
            box = (first + slot.cuts[slot.owner], first + slot.cuts[slot.owner + 1]), *box[1:]
        found[slot.name] = tuple(slice(*ends) for ends in box), mine
    return found


def _closed(keeper: CheckpointManager, said: list[str]) -> int | None:
    """The step that is on the disk."""
    try:
        keeper.wait()
        return keeper.saved
    except (*KINDS, ig.IsogradError) as error:
        said.append(f"wait: {error}"[:150])
        if keeper._writing is not None:
            keeper._writing.given_up.set()
        return None
    finally:
        if keeper._lock is not None:
            keeper._lock.close()


def trained(
    layout: str, experts: bool, steps: tuple[int, ...], victim: int | None, point: Point | None, kind: type,
    after: str, folder: str | None,
) -> Found:  # fmt: skip
    """One rank's program. victim: which rank raises; None counts the points of all."""
    mesh = Mesh(layout)
    engine = decoder(mesh, experts)
    keeper = None if folder is None else CheckpointManager(folder, engine)
    taken: list[tuple[int, float, float]] = []
    last: Parts = {}
    said: list[str] = []
    profile = Raises(point, kind("injected"))
    micros = 2 if mesh.layout.pp > 1 or 4 // mesh.size("dp") > 1 else 1
    saved: dict[int | None, int] = {}

    def round_of(step: int) -> None:
        nonlocal last
        stats = engine.train_step(batch(step, mesh), micros)
        taken.append((step, stats.loss, stats.grad_norm))
        watching = sys.getprofile()
        sys.setprofile(None)
        last = parts(engine)
        sys.setprofile(watching)
        if step == VICTIM_STEP:
            engine.evaluate(batch(step, mesh), micros)
        if keeper is not None and step in (VICTIM_STEP, steps[-1]):
            keeper.save(step)
            saved[step] = len(taken)

    for step in steps:
        tries = 2 if step == VICTIM_STEP and after == "retry" else 1
        while tries:
            tries -= 1
            before = len(taken)
            try:
                if mesh.rank == victim or (victim is None and step == VICTIM_STEP and folder is not None):
                    sys.setprofile(profile if step == VICTIM_STEP and profile.hit is None else None)
                try:
                    round_of(step)
                finally:
                    sys.setprofile(None)
                break
            except (*KINDS, ig.IsogradError) as error:
                said.append(f"step {step}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                tries *= len(taken) == before
                if after == "nothing":  # the next call is refused, on all ranks together
                    tries += engine.step_state.now.phase.failure is not None and not isinstance(error, ig.IsogradError)
                    continue
                try:
                    engine.discard()
                except (*KINDS, ig.IsogradError) as refusal:
                    said.append(f"discard: {type(refusal).__name__}: {refusal}"[:150])
    on_disk = None if keeper is None else saved.get(_closed(keeper, said))
    state = engine.step_state
    can_step = state.optimizer_inconsistent is None and state.state is State.OPEN and mesh.group("world").transport
    final = parts(engine) if can_step else None
    return Found(tuple(taken), last, final, on_disk, profile.points, profile.hit, time.monotonic(), tuple(said))


@cache
def truth(steps: tuple[int, ...], experts: bool) -> Found:
    """One device that takes these steps."""
    found: Found = threads.run(trained, 1, "dp1", experts, steps, None, None, RuntimeError, "discard", None)[0]
    return found


@cache
def points_of(layout: str) -> list[Counter[tuple[str, str]]]:
    """Of each rank: how many points of each state and kind it passes."""
    with tempfile.TemporaryDirectory() as folder:
        job = layout, _routed(layout), (0, 1), None, None, RuntimeError, "", folder
        return [found.points for found in threads.run(trained, Layout.parse(layout).world_size, *job)]


def _routed(layout: str) -> bool:
    return Layout.parse(layout).ep > 1


def _threads(job: tuple[Any, ...]) -> list[Found]:
    return threads.run(trained, Layout.parse(job[0]).world_size, *job, timeout=HANG_S)


def _on_gloo(job: tuple[Any, ...]) -> Found:
    """In a process that may have been a rank of a world that was closed."""
    comm_world.leave()
    comm_world.join(*_seat(), job[-1] + ".store")
    return trained(*job)


def _seat() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


WORLDS: dict[int, World] = {}


def _gloo(job: tuple[Any, ...]) -> list[Found]:
    world = WORLDS.setdefault(ranks := Layout.parse(job[0]).world_size, World(ranks))
    if not world.pids:
        world.run(sgd, [torch.zeros(1, requires_grad=True)])  # torch imports its compiler: 20 s on a busy machine
    Path(job[-1] + ".store").mkdir()
    return world.run(_on_gloo, job, timeout=HANG_S)


def restored(folder: str, experts: bool) -> tuple[int, Parts]:
    """The newest checkpoint, on one device."""
    engine = decoder(Mesh("dp1"), experts)
    with CheckpointManager(folder, engine) as keeper:
        loaded = keeper.load()
    assert loaded is not None
    return loaded.step, parts(engine)


def off(mine: Parts, whole: Parts) -> float:
    """The largest difference."""
    pairs = [(tensor, whole[name][1][box]) for name, (box, tensor) in mine.items()]
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def check(found: list[Found], layout: str, victim: int, folder: str) -> None:
    """Raise AssertionError where a rank believes what one device does not say."""
    experts = _routed(layout)
    orders = [tuple(step for step, _, _ in rank.taken) for rank in found]
    longest = max(orders, key=len)
    hit = found[victim].hit
    for rank, order in zip(found, orders, strict=True):
        # Ranks differ at most in the last step that any of them took.
        assert order == longest or order == longest[:-1], "other steps were taken"
        for mine, exact in zip(rank.taken, truth(longest, experts).taken, strict=False):
            assert mine == pytest.approx(exact, rel=1e-9, abs=0), f"{mine} for {exact}"
        whole = truth(order, experts).last
        assert not order or off(rank.last, whole) < 1e-9, (
            f"weights after step {order[-1]} are {off(rank.last, whole)} off"
        )
        if rank.final is not None and order:
            assert off(rank.final, whole) < 1e-9, f"weights at the end are {off(rank.final, whole)} off"
        assert hit is None or rank.ended - hit < ANSWER_S, f"a rank ended {rank.ended - hit:.1f} s after the exception"
    for count in {rank.saved for rank in found} - {None}:
        assert count is not None
        step, weights = restored(folder, experts)
        taken = longest[: longest.index(step) + 1]
        assert len(taken) == count and off(weights, truth(taken, experts).last) < 1e-9, "another state was saved"


def draw(seed: int, layout: str = "", turn: int | None = None) -> tuple[str, int, Point, type, str]:
    """(layout, victim, point, exception, what follows). `turn`: the states take turns, in place of a drawn one."""
    dice, layout = random.Random(seed), layout or LAYOUTS[seed % len(LAYOUTS)]
    victim = dice.randrange(Layout.parse(layout).world_size)
    counted = points_of(layout)[victim]
    states = sorted({state for state, _ in counted})
    state = dice.choice(states) if turn is None else states[turn % len(states)]
    kind = dice.choice(sorted(kind for at, kind in counted if at == state))
    point, error, after = (state, kind, dice.randint(1, counted[state, kind])), dice.choice(KINDS), dice.choice(AFTER)
    # A program that ignores an exception of its own between two calls has left its batch out on one rank.
    return layout, victim, point, error, "discard" if (state, after) == ("between", "nothing") else after


def one(case: tuple[str, int, Point, type, str], runs: Callable[[tuple[Any, ...]], list[Found]]) -> bool:
    """Whether the point was reached: polling makes the number of calls differ from run to run."""
    layout, victim, point, kind, after = case
    what = f"{layout}, rank {victim}, {kind.__name__} at {point}, then {after}"
    with tempfile.TemporaryDirectory() as above:
        folder = f"{above}/run"
        try:
            found = runs((layout, _routed(layout), tuple(range(STEPS)), victim, point, kind, after, folder))
        except ig.IsogradError as error:
            raise AssertionError(f"{what}: {error}") from error
        try:
            check(found, layout, victim, folder)
        except AssertionError as error:
            told = "\n".join(f"rank {n}: took {[row[0] for row in r.taken]}; {r.said[:3]}" for n, r in enumerate(found))
            raise AssertionError(f"{what}: {error}\n{told}") from error
    return found[victim].hit is not None


@pytest.mark.medium
@pytest.mark.parametrize("first", range(0, 105, 5))
def test_a_step_is_right_or_refused_wherever_an_exception_comes(first: int) -> None:
    reached = [one(draw(seed), _threads) for seed in range(first, first + 5)]
    assert sum(reached) > 3


@pytest.mark.medium
def test_a_rank_that_skips_an_evaluation_and_trains_is_found_at_its_first_gather() -> None:
    """At ZeRO 3 with a ring: its forwards passed for those of the evaluation, and all ranks waited for ever."""
    layout, entering = "dp2 cp2 ring zero3", "between"
    last = points_of(layout)[1][entering, "call"] - 3  # `evaluate` is entered and left, then `save`
    assert one((layout, 1, (entering, "call", last), RuntimeError, "nothing"), _threads)


@pytest.mark.medium
@pytest.mark.parametrize(("seed", "layout"), [(476, "dp2 pp2 zero3"), (1178, "dp2 zero2")])
def test_an_optimizer_that_raises_on_one_rank_is_refused_on_all(seed: int, layout: str) -> None:
    """The others took the step with its old rows; in a pipeline at ZeRO 3 they evaluated while it trained on."""
    assert one(draw(seed, layout), _threads)


def main(count: int, first: int = 0, only: str = "") -> None:
    """`only`: "threads" or "gloo"; left out, every tenth case is on gloo."""
    torch.set_num_threads(1)
    hits: Counter[tuple[str, str, str]] = Counter()
    wrong = missed = 0
    for seed in range(first, first + count):
        case, gloo = draw(seed, turn=seed // len(LAYOUTS)), only == "gloo" or (not only and seed % 10 == 0)
        try:
            reached = one(case, _gloo if gloo else _threads)
        except AssertionError as error:
            wrong, reached = wrong + 1, True
            print(f"seed {seed} on {'gloo' if gloo else 'threads'}: {error}\n", flush=True)
        missed += not reached
        hits[case[0], case[2][0], case[2][1]] += reached
        if (done := seed - first + 1) % 100 == 0:
            print(f"{done} of {count}: {wrong} wrong", file=sys.stderr, flush=True)
    for layout in LAYOUTS:
        for state in STATES.keys() | {"between"}:
            told = [f"{kind} {n}" for (at, where, kind), n in sorted(hits.items()) if (at, where) == (layout, state)]
            if told:
                print(f"{layout:24} {state:14} {', '.join(told)}")
    print(f"{wrong} wrong of {count}; {missed} not reached")
    for world in WORLDS.values():
        world.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
