"""Bits that flip in a step: what a checksum through the reduction and a neighbour's replay find, and whom they name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.comm import raw, threads, world
from isograd.comm.consensus import all_gather_object
from isograd.comm.group import Group
from isograd.core.layout import Layout
from isograd.engine import batches
from isograd.engine.engine import Engine
from isograd.engine.sdc import reductions
from isograd.engine.sdc.memory import MemoryChecksum
from isograd.engine.sdc.replay import ReplayCheck
from isograd.errors import EngineError
from isograd.train.sections import Safety
from tests.checkpoint import toys
from tests.engine.test_random_interruptions import LAYOUTS

NAME = "blocks.1.mlp.up.weight"
EXCHANGED, SIGNS = -1, -2
Plant = Callable[[Engine, int], Any]


def flip(tensor: Tensor, bit: int) -> None:
    """In fp32: bit 30 is of the exponent, 22 the highest of the mantissa, 0 the lowest. EXCHANGED: no bit, but two
    elements that <v, rows> gives the same sign; SIGNS: the signs of two elements."""
    if bit == EXCHANGED:
        same = (reductions._signs(tensor.device) > 0).nonzero()[:2].flatten()
        tensor.view(-1)[same] = tensor.view(-1)[same.flip(0)]
        return
    if bit == SIGNS:
        tensor.view(-1)[1:4:2].neg_()
        return
    tensor.view(torch.int32).view(-1)[1:2].bitwise_xor_(1 << bit)


def used(chunk: Tensor) -> Tensor:
    """A chunk of a bucket from its first row on: an owner that has no row of a parameter has padding in its place."""
    return chunk[int(chunk.nonzero()[0]) :]


def once(at: int, change: Callable[[], None]) -> Callable[[], None]:
    """`change` at the given call and at no other."""
    calls = [0]

    def called() -> None:
        calls[0] += 1
        if calls[0] == at:
            change()

    return called


@contextmanager
def nothing(engine: Engine, bit: int) -> Iterator[None]:
    yield


@contextmanager
def on_the_wire(engine: Engine, bit: int) -> Iterator[None]:
    """A message of gradients is changed between rank 1 and the owner of the rows."""
    original = raw.exchange

    def exchange(out, into, group, tag=0, **more):
        if group.purpose != "gradients":
            return original(out, into, group, tag, **more)
        largest = max((t for i, pieces in enumerate(out) for t in pieces if i != group.index), key=Tensor.numel)
        hits()
        if hit:
            changed = largest.clone()
            flip(used(changed), bit)
            out = [[changed if t is largest else t for t in pieces] for pieces in out]
            hit.clear()
        return original(out, into, group, tag, **more)

    hit: list[bool] = []
    hits = once(1, lambda: hit.append(True))
    if engine.mesh.rank == 1:
        raw.exchange = exchange
    try:
        yield
    finally:
        raw.exchange = original


@contextmanager
def in_the_sum(engine: Engine, bit: int) -> Iterator[None]:
    """An addition of rank 1 is wrong."""
    original = raw.add_up
    done: list[bool] = []

    def add(*of):
        total = original(*of)
        if not done and total.numel() > 1000:  # a bucket's, and no status of ranks
            flip(used(total), bit)
            done.append(True)
        return total

    if engine.mesh.rank == 1:
        raw.add_up = add
    try:
        yield
    finally:
        raw.add_up = original


@contextmanager
def in_a_gradient(engine: Engine, bit: int) -> Iterator[None]:
    """Once, as autograd makes it on rank 1."""

    def hook(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        hit = once_only()
        if hit:
            flip(changed, bit)
        return changed

    calls = [0]

    def once_only() -> bool:
        calls[0] += 1
        return calls[0] == 1

    parameter = engine.table.records[NAME].parameter
    handle = parameter.register_hook(hook) if engine.mesh.rank == 1 else None
    yield
    if handle is not None:
        handle.remove()


@contextmanager
def in_an_activation(engine: Engine, bit: int) -> Iterator[None]:
    """Once, in the forward of a norm on rank 1."""
    calls = [0]

    def hook(module, args, out: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 1:
            return out
        mask = torch.zeros_like(out).detach()
        changed = out.detach().clone()
        flip(changed, bit)
        mask += changed - out.detach()
        return out + mask

    norm = next(m for n, m in engine.model.named_modules() if n == "blocks.1")
    handle = norm.register_forward_hook(hook) if engine.mesh.rank == 1 else None
    yield
    if handle is not None:
        handle.remove()


@contextmanager
def in_a_parameter(engine: Engine, bit: int) -> Iterator[None]:
    """On rank 1, and it stays."""
    if engine.mesh.rank == 1:
        flip(engine.local_shard(NAME).data, bit)
    yield


@contextmanager
def in_the_optimizer(engine: Engine, bit: int) -> Iterator[None]:
    """A row of Adam's first moment on rank 1."""
    if engine.mesh.rank == 1:
        state = next(kept for kept in engine.optimizer.state.values() if kept["exp_avg"].numel() > 8)
        flip(state["exp_avg"], bit)
    yield


PLACES: dict[str, Plant] = {
    "nowhere": nothing, "wire": on_the_wire, "sum": in_the_sum, "gradient": in_a_gradient,
    "activation": in_an_activation, "parameter": in_a_parameter, "optimizer": in_the_optimizer,
}  # fmt: skip


def checked_step(engine: Engine, step: int, *, replays: bool = True, seals: list[MemoryChecksum] | None = None) -> str:
    """A step with checks: "" or what was said; then it is dropped."""
    batch, micros = toys.batch(step, engine.mesh), 2
    try:
        replay = ReplayCheck(engine) if replays else None
        engine.check_sums()
        if replay is not None:
            replay.begin()
        engine.accumulate(batch, micros)
        if seals is not None:
            seals[-1].check()
        if replay is not None:
            replay.compare(batches.micro_batches(batch, micros)[0])
        engine.step()
    except EngineError as error:
        if not engine.step_state.empty:
            engine.discard()
        return f"{error.code}: {error.what}: {error.seen}"
    if seals is not None:
        seals.append(MemoryChecksum(engine))
    return ""


def planted(layout: str, place: str, bit: int, *, sealed: bool = False) -> list[str]:
    """A good step, then two in whose first the bit flips, until something is said."""
    engine = toys.engine_of(layout, dtype=torch.float32)
    seals = [MemoryChecksum(engine)] if sealed else None
    said = [checked_step(engine, 0, seals=seals)]
    with PLACES[place](engine, bit):
        for step in (1, 2):
            said.append(checked_step(engine, step, seals=seals))
            if said[-1]:
                break
    return [*said, checked_step(engine, 9, seals=seals)]


def planted_all(cases: list[tuple[str, str, int]], *, sealed: bool = False) -> list[list[str]]:
    return [planted(*case, sealed=sealed) for case in cases]


ONE_OF_TWO = "rank 0 or rank 1 computed wrongly"
CASES = {
    ("dp2 zero1", "nowhere", 0): "",
    ("dp2 zero0", "nowhere", 0): "",
    ("dp2 zero1", "wire", 0): "between rank 1, which sent them, and rank 0, which owns them",
    ("dp2 zero1", "wire", EXCHANGED): "between rank 1, which sent them, and rank 0, which owns them",
    ("dp2 zero1", "wire", SIGNS): "between rank 1, which sent them, and rank 0, which owns them",
    ("dp2 zero2", "wire", 30): "between rank 1, which sent them, and rank 0, which owns them",
    ("dp2 zero1", "sum", 0): "added up wrongly on rank 1: a second time the result was another",
    ("dp2 zero0", "sum", 29): "added up wrongly on rank 1",
    ("dp2 zero1", "gradient", 0): "IG581: two ranks computed different gradients of one micro-batch: rank 1 computed",
    ("dp2 zero1", "activation", 22): "IG581: two ranks computed different gradients of one micro-batch: rank 1 comp",
    ("dp2 zero1", "parameter", 5): ONE_OF_TWO,
}  # fmt: skip


@pytest.mark.medium
def test_planted_flips_are_found_in_their_step_and_their_rank_is_named(worlds) -> None:
    """The table of docs/corruption.md. The step after the one that was refused is right again, or refused again."""
    ours, theirs = worlds(2).run(planted_all, list(CASES))
    for (case, expected), said, also in zip(CASES.items(), ours, theirs, strict=True):
        assert said == also, case  # all ranks alike
        assert said[0] == "", case
        if not expected:
            assert said == [""] * 4, case
        else:
            assert expected in said[1], (case, said)
            stays = case[1] == "parameter"
            assert (said[-1] != "") == stays, (case, said)
            assert NAME in said[1] or case[1] in ("sum", "wire", "activation", "parameter"), case


@pytest.mark.slow
def test_the_table_of_the_docs(worlds) -> None:
    """Printed: for each place and bit, what is said in the step of the flip, or in one of the two after it."""
    cases = [("dp2 zero1", place, bit) for place in PLACES for bit in (0, 10, 16, 22, 26, 30)]
    found = worlds(2).run(partial(planted_all, sealed=True), cases, timeout=500)[0]
    for (_, place, bit), said in zip(cases, found, strict=True):
        step = next((str(at) for at, text in enumerate(said) if text), "-")
        print(f"{place:12} {bit:3}  step {step}  {next(filter(None, said), '')[:150]}")
        assert (place == "nowhere") == (not any(said)), (place, said)


@pytest.mark.medium
def test_of_four_ranks_the_one_with_a_changed_parameter_is_named(worlds) -> None:
    said = worlds(4).run(planted, "dp4 zero1", "parameter", 5)[0]
    assert "rank 1 computed wrongly" in said[1]
    said = worlds(4).run(planted, "dp2 tp2", "wire", 0)[0]
    assert "IG580" in said[1]
    assert worlds(4).run(planted, "dp2 tp2 sp", "nowhere", 0)[0] == [""] * 4


def healthy(layout: str, options: dict[str, Any], dtype: torch.dtype) -> list[str]:
    engine = toys.engine_of(layout, dtype=dtype, **options)
    return [checked_step(engine, step, replays="zero3" not in layout) for step in range(6)]


@pytest.mark.medium
def test_healthy_runs_raise_no_alarm(worlds) -> None:
    for layout, options, dtype in (
        ("dp2 zero3", {}, torch.float32), ("dp2 zero1", {}, torch.bfloat16), ("dp2 zero2", {}, torch.float64),
    ):  # fmt: skip
        assert worlds(2).run(healthy, layout, options, dtype)[0] == [""] * 6, layout


def two_engines() -> list[str]:
    """A checked step of one engine, with a step of another one, and then a checked one, in its middle."""
    one, other = toys.engine_of("dp2 zero3", dtype=torch.float32), toys.engine_of("dp2 zero1", dtype=torch.float32)
    said = []
    for step in range(2):
        one.check_sums()
        one.accumulate(toys.batch(0, one.mesh), 2)
        if step:
            other.check_sums()
        other.accumulate(toys.batch(1, other.mesh), 2)
        other.step()
        try:
            one.step()
        except EngineError as error:
            said.append(str(error))
        said.append(str(len(one.mesh.group("world").context.checks)))
    return said


@pytest.mark.medium
def test_the_sums_of_an_engine_stay_when_another_one_steps_beside_it(worlds) -> None:
    assert worlds(2).run(two_engines) == threads.run(two_engines, 2, timeout=60) == [["0"] * 2] * 2


def step_with_a_flip(layout: str, model: str, axes: str, groups: list[Group], flips: Counter[str]) -> list[str]:
    """A good step, one in which a bit of rank 1's first message over `axes` flips, a good one."""
    engine = toys.engine_of(layout, model, dtype=torch.float32)
    said = []
    for step in range(3):
        if step == 1 and engine.mesh.rank == 1:
            threads.member().flip = lambda transport, t: (
                t.dtype == torch.float32 and t.numel() >= 16 and any(
                    g.transport is transport and g.axes == axes and g.purpose != "gradients" for g in groups
                )
            )  # fmt: skip
        said.append(checked_step(engine, step, replays=False))
    flips[layout] += not hasattr(threads.member(), "flip")
    return said


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layout", "model", "axes"),
    [
        ("pp2", "qwen", "pp"), ("tp2", "qwen", "tp"), ("tp2 sp", "qwen", "tp"), ("cp2", "qwen", "cp/2"),
        ("dp2 ep2", "experts", "ep"), ("dp2 zero3", "qwen", "dp cp"),
    ],
)  # fmt: skip
def test_a_bit_flipped_in_a_message_is_found_in_its_step(layout, model, axes, monkeypatch) -> None:
    """Rows of FAILURES.md, E 11: activations between stages, of tp, cp and ep, and a block gathered by ZeRO 3."""
    send = threads.ThreadTransport.send

    def sent(self, handle, tensors, peer, tag, control):
        wanted = None if control else getattr(self.member, "flip", None)
        if wanted and any(wanted(self, t) for t in tensors):
            del self.member.flip
            tensors = [t.detach().clone() for t in tensors]
            flip(next(t for t in tensors if t.numel() >= 16), 2)
        send(self, handle, tensors, peer, tag, control)

    monkeypatch.setattr(threads.ThreadTransport, "send", sent)
    flips, groups, new_group = Counter[str](), list[Group](), world.new_group

    def noted(*args: Any) -> Group:
        groups.append(new_group(*args))
        return groups[-1]

    monkeypatch.setattr(world, "new_group", noted)
    ours, theirs = threads.run(step_with_a_flip, 2, layout, model, axes, groups, flips, timeout=60)
    assert flips[layout] == 2, "the bit was flipped"
    assert ours == theirs
    assert ours[0] == ours[2] == "", ours
    assert f"a message of {axes}" in ours[1], ours
    assert "between rank 1, which sent it, and rank 0, which received it" in ours[1], ours


def refused(layout: str) -> str:
    with pytest.raises(EngineError) as caught:
        ReplayCheck(toys.engine_of(layout))
    return f"{caught.value.code}: {caught.value.seen}"


def test_layouts_that_cannot_be_computed_again_are_refused(worlds) -> None:
    assert worlds(2).run(refused, "dp2 zero3")[0].startswith("IG582: at ZeRO 3")
    assert worlds(2).run(refused, "pp2")[0].startswith("IG582: a pipeline")


# -- what runs by default: the weights, before each step -------------------------------------------------------------


def flipped_weights(layout: str, dtype: torch.dtype) -> int:
    """How many tensors the rank has that holds most. One after the other, two bits of each flip: that is named on all
    ranks before the next step, and nothing where nothing has flipped."""
    engine = toys.engine_of(layout, "experts" if "ep" in layout else "qwen", dtype=dtype)
    mesh = engine.mesh
    defaults = Safety()
    assert (defaults.state_every, defaults.state) == (1, "weights")
    toys.train(engine, 0, 1, gradients=False)
    seal = MemoryChecksum(engine, optimizer=False)  # as the loop makes it
    every = all_gather_object(list(seal._tensors()), mesh)
    victim = max(range(len(every)), key=lambda rank: len(every[rank]))
    keys = every[victim]
    for key in keys:
        for bit in (0, 14):
            last = seal._tensors()[key].view(-1)[-1:] if mesh.rank == victim else torch.zeros(1)
            word = last.view(torch.int16)
            word.bitwise_xor_(1 << bit)
            with pytest.raises(EngineError) as caught:
                seal.check()
            assert caught.value.code == "IG583" and f"{key} on rank {victim}" in str(caught.value)
            word.bitwise_xor_(1 << bit)
            seal.check()
    return len(keys)


HALF = [(layout, torch.bfloat16) for layout in ("dp2", "dp2 zero1", "dp2 zero3", "tp2 sp", "dp2 ep2")]


@pytest.mark.parametrize(("layout", "dtype"), [*((layout, torch.float32) for layout in LAYOUTS), *HALF], ids=str)
def test_by_default_any_flipped_weight_is_found_before_the_next_step_under_every_layout(layout, dtype) -> None:
    found = threads.run(flipped_weights, Layout.parse(layout).world_size, layout, dtype, timeout=60)
    assert len(set(found)) == 1 and found[0] > 3
