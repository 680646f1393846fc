"""What reads or frees parameters of a ZeRO 3 model beside its forward: copies, state dicts, what autograd has saved.

FAILURES A9 (a block that uses `w.detach()`, parameters in one storage), A15 (copies), A17 (state_dict, torch.save).
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.engine.zero3.sharded_param import ShardedParam
from isograd.errors import EngineError

from . import toys
from .test_units import Chain, loss_of, memory

WIDTH = 24


# -- A9: what autograd has saved ---------------------------------------------------------------------------------


class Gate(nn.Module):
    """Reads `w` once without a gradient and once with one: the second read's gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.aside = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.aside = (x * self.w).square().mean()  # a loss of its own, like that of a router
        return (x * self.w.detach()) * self.w


class Gated(nn.Module):
    """Gates in blocks and outside of them; two parameters in halves of one storage; a buffer that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Gate() for _ in range(3))
        self.last = Gate()
        both = torch.randn(2 * WIDTH)
        self.left, self.right = nn.Parameter(both[:WIDTH]), nn.Parameter(both[WIDTH:])
        self.register_buffer("first_left", self.left.data)
        self.double()
        self.left.data, self.right.data = both.double().split(WIDTH)
        self.first_left = self.left.data

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.left.detach() + self.left * self.right
        for block in self.blocks:
            x = block(x)
        x = self.last(x) * self.left
        return x.square().mean() + sum(gate.aside for gate in [*self.blocks, self.last])  # type: ignore[return-value]


def batch(index: int) -> Tensor:
    return torch.randn(3 + index, WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def gated(keep_gathered: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    mesh, model = Mesh("dp2 zero3"), Gated()
    engine = Engine(model, mesh, toys.sgd, keep_gathered=keep_gathered)
    before = model.first_left.clone()
    for _ in range(2):  # with and without blocks that are known beforehand
        x = batch(mesh.rank)
        engine.backward(model(x), weight=len(x))
    return {name: g.clone() for name, g in engine.grads().items()}, before, model.first_left


def test_a_parameter_stays_whole_until_nothing_saved_in_its_block_reads_it(worlds) -> None:
    """FAILURES A9: SIGSEGV."""
    plain, rows = Gated(), 0
    for index in range(2):
        (plain(batch(index)) * len(batch(index))).backward()
        rows += len(batch(index))
    for keep_gathered in (False, True):
        for gradients, before, buffer in worlds(2).run(gated, keep_gathered):
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                error = float((gradients[name] - parameter.grad / rows).norm())
                assert error <= 1e-9 * float(parameter.grad.norm() / rows), name
            assert torch.equal(before, buffer)


def overlapping() -> str:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight.data = model[0].weight.data.t()
    for linear in model:
        linear.weight.requires_grad_(False)
    head = nn.Sequential(model, nn.Linear(6, 2))
    return raised(lambda: Engine(head, Mesh("dp2 zero3"), toys.sgd))


def test_two_parameters_of_the_same_memory_are_refused(worlds) -> None:
    """FAILURES A9, where they overlap: each gather would write into both."""
    for said in worlds(2).run(overlapping):
        assert "IG573" in said
        assert "'0.0.weight' and '0.1.weight'" in said


class Stack(nn.Module):
    """Equal blocks, and a small root."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks)), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def peak(blocks: int) -> tuple[float, float]:
    """Blocks that are whole at once in a forward, and in a backward."""
    mesh, model = Mesh("dp2 zero3"), Stack(blocks)
    engine = Engine(model, mesh, toys.sgd)
    most, grow = 0, ShardedParam.alloc_full

    def looking(self: ShardedParam) -> None:
        nonlocal most
        grow(self)
        most = max(most, sum(memory(engine)))

    block = sum(p.numel() * p.itemsize for p in model.blocks[0].parameters())
    engine.backward(model(torch.ones(2, 64)), weight=2)  # from now on the order is known
    ShardedParam.alloc_full = looking  # type: ignore[method-assign]
    try:
        loss = model(torch.ones(2, 64))
        forward, most = most, 0
        engine.backward(loss, weight=2)
    finally:
        ShardedParam.alloc_full = grow  # type: ignore[method-assign]
    return forward / block, most / block


def test_one_block_is_whole_at_once_while_rows_of_the_next_one_arrive_packed(worlds) -> None:
    for forward, backward in worlds(2).run(peak, 6):
        assert 1 < forward < 1.1
        assert 1 < backward < 1.1


# -- A15, A17: copies and state dicts ----------------------------------------------------------------------------


def raised(run: Callable[[], Any]) -> str:
    try:
        run()
    except EngineError as error:
        return str(error)
    return ""


def outside(model: nn.Module) -> dict[str, str]:
    """What each way to read or write all parameters says when they are not there."""
    ways: dict[str, Callable[[], Any]] = {
        "copy.deepcopy": lambda: copy.deepcopy(model),
        "copy.deepcopy of a block": lambda: copy.deepcopy(model.blocks[1]),
        "state_dict()": model.state_dict,
        "state_dict() of a block": model.blocks[1].state_dict,
        "load_state_dict()": lambda: model.load_state_dict(Chain().state_dict()),
        "torch.save(model)": lambda: torch.save(model.blocks[1], io.BytesIO()),
    }
    return {what: raised(run) for what, run in ways.items()}


def copied() -> tuple[dict[str, str], list[bool]]:
    mesh, model = Mesh("dp2 zero3"), Chain()
    engine = Engine(model, mesh, toys.sgd)
    said = outside(model)
    engine.backward(*loss_of(model, 0, mesh.rank + 2))
    engine.step()
    with engine.full_parameters():
        ema, state = copy.deepcopy(model), {n: t.clone() for n, t in model.state_dict().items()}
        file = io.BytesIO()
        torch.save(model, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)  # made three lines above
    facts = [not any(memory(engine))]
    facts += [torch.equal(value, state[name]) for name, value in saved.state_dict().items()]
    facts += [torch.equal(value, state[name]) for name, value in ema.state_dict().items()]
    loss, rows = loss_of(ema, 1, 2)  # an ordinary model: on this rank alone, with gradients, twice
    if mesh.rank == 0:
        loss.backward()
        loss_of(ema, 1, 2)[0].backward()
        facts.append(all(p.grad is not None for p in ema.parameters() if p.requires_grad))
    facts.append(not any(memory(engine)))
    found, _ = loss_of(model, 1, 2)
    facts.append(torch.equal(found, loss))
    with engine.full_parameters():
        facts.append(not model.load_state_dict({n: t + 1 for n, t in state.items()}).missing_keys)
    with engine.full_parameters():
        facts += [torch.equal(t, state[n] + 1) for n, t in model.state_dict().items()]
    ema.zero_grad()
    second = Engine(ema, mesh, toys.sgd)
    second.backward(*loss_of(ema, 0, mesh.rank + 2))
    second.step()
    return said, [*facts, bool(rows)]


def test_copies_and_state_dicts_are_whole_inside_full_parameters_and_refused_outside(worlds) -> None:
    """FAILURES A15: 'cannot pickle ProcessGroup'. A17: 38 of 38 tensors of a state dict were NaN, without a word."""
    for said, facts in worlds(2).run(copied):
        for what, words in said.items():
            assert words.startswith(f"IG574: {what.removesuffix(' of a block')} of a ZeRO 3 model"), what
            assert "full_parameters" in words
        assert all(facts)
