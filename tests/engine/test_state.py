"""Each value that a rank keeps between steps has one kind, and one rank that writes it."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isograd.core.mesh import Mesh
from isograd.engine import ChainedOptimizer, Engine, state
from isograd.errors import EngineError
from tests.engine.toys import Toy, loss_of, micro_batch


def adamw(shards: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(shards, lr=1e-2)


def stepped(layout: str, optimizer: Callable[..., torch.optim.Optimizer] = adamw, **options: Any) -> Engine:
    engine = Engine(Toy(), Mesh(layout), optimizer, **options)
    engine.backward(loss_of(engine.model, *micro_batch(0, engine.mesh.index("dp"))), weight=4)
    engine.step()
    return engine


def said(engine: Engine) -> tuple[dict[str, str], dict[str, dict[str, Any]], list[str], list[str]]:
    """(kinds, numbers that this rank writes, parameters with state here, those with rows here)."""
    declared = state.declare(engine)
    names = {id(master): name for name, master in engine._sharded_optimizer.masters.items()}
    held = [names[id(master)] for master, kept in engine.optimizer.state.items() if kept]
    rows = [name for name, master in engine._sharded_optimizer.masters.items() if master.numel()]
    return declared.entries, state.counts(engine, declared), held, rows


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_one_rank_writes_each_number_and_only_owners_of_rows_hold_it(worlds, zero: int) -> None:
    (kinds, first, *_), (_, second, *_) = worlds(2).run(stepped_and_said, f"dp2 zero{zero}")
    assert kinds == {"AdamW.exp_avg": state.ELEMENT, "AdamW.exp_avg_sq": state.ELEMENT, "AdamW.step": state.PARAMETER}
    ours, theirs = first.get("step", {}), second.get("step", {})
    assert not ours.keys() & theirs.keys()
    used = {name for name, p in Toy().named_parameters() if p.requires_grad and not name.startswith("unused")}
    assert ours.keys() | theirs.keys() == used
    assert {tuple(value) for value in {**ours, **theirs}.values()} == {(1.0, "float32")}


def stepped_and_said(layout: str) -> Any:
    return said(stepped(layout))


def loaded(layout: str) -> Any:
    """After numbers of all parameters were loaded, whatever rank wrote them."""
    engine = stepped(layout)
    run = state.declare(engine).run
    names = list(engine._sharded_optimizer.masters)
    counts = {"step": {name: [9.0, "float32"] for name in names}}
    shapes = {slot.name: tuple(slot.contract.shape) for slot in engine.plan.slots}
    state.make_room(engine, {name: {"exp_avg": (torch.float64, shapes[name])} for name in names})
    state.take_numbers(engine, {**run, "counts": counts})
    return said(engine)[2:]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_load_gives_a_parameters_numbers_to_ranks_that_own_rows_of_it_and_to_no_other(worlds, zero: int) -> None:
    """FAILURES B1: a rank without rows that holds a step count never moves it."""
    for held, rows in worlds(2).run(loaded, f"dp2 zero{zero}"):
        assert sorted(held) == sorted(rows)


def spoil(engine: Engine, what: str) -> None:
    """Put something into one rank's optimizer that has no place."""
    if engine.mesh.rank != 1:
        return
    master = next(m for m in engine._sharded_optimizer.masters.values() if m.dim() == 2 and m.numel())
    group = engine.optimizer.param_groups[0]
    if what == "list":
        engine.optimizer.state[master]["history"] = [1.0, 2.0]
    elif what == "shape":
        engine.optimizer.state[master]["row_factor"] = torch.ones(len(master) + 1)
    elif what == "both":
        engine.optimizer.state[master]["exp_avg"] = torch.zeros(())
    elif what == "group":
        group["table"] = torch.ones(3)
    elif what == "counter":
        engine.optimizer.state["seen"] = {1: 2}  # type: ignore[index]
    elif what == "unequal":
        group["d"] = 0.25


SPOILT = {
    "list": r"'history' of '\S+': a list",
    "shape": r"'row_factor' of '\S+': shape \(\d+,\)",
    "both": r"AdamW.exp_avg: per element for '\S+' and per parameter for '\S+'",
    "group": r"AdamW's group option 'table': shape \(3,\)",
    "counter": r"AdamW's state 'seen': a dict",
    "unequal": r"rank 0 and rank 1: 'd' is None and 0.25",
}


def refusals(layout: str) -> list[str]:
    found = []
    for what in SPOILT:
        engine = stepped(layout)
        spoil(engine, what)
        with pytest.raises(EngineError, match="IG540") as error:
            state.declare(engine)
        found.append(str(error.value))
    return found


def test_what_cannot_be_placed_is_refused_by_name_on_all_ranks(worlds) -> None:
    ours, theirs = worlds(2).run(refusals, "dp2 zero1")
    assert ours == theirs
    for text, pattern in zip(ours, SPOILT.values(), strict=True):
        assert re.search(pattern, text), text


class Tensors(torch.optim.SGD):
    """Keeps a float of shape () and one of shape (1,) for each parameter: a gain of shape () leaves their kind open."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("total", torch.zeros(()))
                    self.state[p].setdefault("one", torch.zeros(1))


def test_one_element_is_of_the_kind_that_the_other_parameters_show() -> None:
    engine = stepped("1", lambda ps: Tensors(ps, lr=0.1, momentum=0.9))
    kinds, counts, *_ = said(engine)
    assert kinds == {
        "Tensors.momentum_buffer": state.ELEMENT, "Tensors.total": state.PARAMETER, "Tensors.one": state.PARAMETER,
    }  # fmt: skip
    assert counts["total"]["gain"] == [0.0, "float32"]
    assert counts["one"]["gain"] == [[0.0], "float32"]


def test_members_of_a_joined_optimizer_have_kinds_of_their_own() -> None:
    def joined(shards: Any) -> torch.optim.Optimizer:
        return ChainedOptimizer(torch.optim.Muon(shards.matrices, lr=1e-2), adamw(shards.rest))

    kinds, *_ = said(stepped("1", joined, matrices=["first.weight"]))
    assert kinds["Muon.momentum_buffer"] == kinds["AdamW.exp_avg"] == state.ELEMENT
    assert kinds["AdamW.step"] == state.PARAMETER


def test_trained_tensors_that_are_not_finite_are_named_and_buffers_are_not() -> None:
    engine = stepped("1")
    engine.model.register_buffer("mask", torch.full((3,), -torch.inf))
    found = state.parts(engine, state.elementwise(engine, state.declare(engine)))
    assert state.not_finite(found, {}) == []
    bad = engine._sharded_optimizer.masters["first.weight"]
    assert isinstance(bad, nn.Parameter)
    engine.optimizer.state[bad]["exp_avg_sq"][3, 2] = torch.inf
    with torch.no_grad():
        engine.model.out.bias[1] = torch.nan
    counts = {"step": {"gain": [torch.inf, "float32"], "out.bias": [1.0, "float32"]}}
    wrong = ["model/out.bias", "optimizer/exp_avg_sq/first.weight", "optimizer/step/gain"]
    assert sorted(state.not_finite(found, counts)) == wrong


# -- torch's own state_dict of the optimizer, which an own loop saves on each rank


def trained(mesh: Mesh) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False)).double()
    engine = Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=0.01))
    engine.backward(model(torch.randn(2, 64).double()).square().mean(), weight=2)
    engine.step()
    return engine


def loads_of(layout: str, whose: str) -> tuple[str, bool]:
    """What a load of a state is refused with, and whether the optimizer's own state is then as it was."""
    mesh = Mesh(layout)
    engine = trained(mesh)
    own, file = copy.deepcopy(engine.optimizer.state_dict()), io.BytesIO()
    if whose == "a plain optimizer's":
        plain = [nn.Parameter(torch.zeros(64, 64).double()) for _ in range(2)]
        for p in plain:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.AdamW(plain, lr=0.01)
        optimizer.step()
        given = optimizer.state_dict()
    else:
        torch.save(own, file)
        files: list[Any] = [None] * mesh.size("world")
        dist.all_gather_object(files, file.getvalue())
        given = torch.load(io.BytesIO(files[mesh.rank if whose == "its own" else 0]), weights_only=True)
    refusal = ""
    try:
        engine.optimizer.load_state_dict(given)
    except EngineError as error:
        refusal = str(error)
    now = engine.optimizer.state_dict()
    pairs = [(now["state"][i][k], v) for i in own["state"] for k, v in own["state"][i].items()]
    return refusal, all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("layout", "whose", "refused"), [
    ("dp2", "rank 0's", []), ("dp2", "its own", []), ("dp2 zero1", "its own", []), ("dp2 zero3", "its own", []),
    ("dp2 zero1", "rank 0's", [1]), ("dp2 zero3", "rank 0's", [1]),
    ("dp2 zero1", "a plain optimizer's", [0, 1]), ("dp2 zero3", "a plain optimizer's", [0, 1]),
])  # fmt: skip
def test_the_rows_of_another_rank_are_not_loaded(worlds, layout: str, whose: str, refused: list[int]) -> None:
    """Weights were off by 0.03, without a word: both ranks' rows have one shape."""
    for rank, (refusal, kept) in enumerate(worlds(2).run(loads_of, layout, whose)):
        assert refusal.startswith("IG585" if rank in refused else ""), refusal
        assert bool(refusal) == (rank in refused)
        assert kept or rank not in refused
        if rank in refused:
            assert "CheckpointManager" in refusal and f"where:    rank {rank}" in refusal
            assert ("rank 0 (dp0) under" if whose == "rank 0's" else "[64, 64] for [32, 64]") in refusal, refusal
