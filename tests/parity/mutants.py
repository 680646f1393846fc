"""Breaks isograd on purpose, one reduction, debt, weight or norm term at a time.

A mutant is a context manager entered in every rank around a parity case. The seam costs production nothing: a mutant
replaces names in the module that uses them. Call sites are found by reading the source, so a new reduction without
mutants makes tests/parity/test_mutants.py fail.

    python -m tests.parity.test_mutants     # run all, write notes/mutants.md (mutant -> the parity test that kills it)
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import isograd
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.core.contract import Contract
from isograd.core.mesh import Mesh

from . import cut_sequences, piped, sparse_mutants
from .regrouped import GATHERS, MESH, Landed, gathered, regrouped

SOURCE = Path(isograd.__file__).parent
SEARCHED = ("engine", "nn", "sequence", "pipeline", "core/contract.py", "core/step_counters.py", "comm/ops.py")

PLAIN = (
    "raw.to_host",
    "raw.copy_to_host",
    "ops.uncompiled",
)  # no communication

# Calls that move no gradient, weight or norm, each with the reason why no mutant is owed.
EXEMPT = {
    "engine/muon.py:_exchange:raw.exchange": "no case has Muon: tests/engine/test_muon.py loses what it brings",
    "engine/step_status.py:used_anywhere:raw.all_reduce": "a tie that some stages do not use: tests/pipeline",
    "engine/data_parallel.py:until_all_exhausted:raw.gather_list": "whether a rank has a batch left; moves no gradient",
    "engine/data_parallel.py:_equal_buffers:raw.broadcast_": "broken in tests/engine/test_data_parallel.py",
    "engine/norm.py:global_norm_beside:raw.gather": "only on cards: tests/imagined_cuda compares with one device",
    "engine/step_status.py:optimizer_problem:raw.gather": "moves no gradient: tests/engine/test_transaction.py",
    "engine/naive.py:gradients:raw.gather_list": "the definition itself: tests/engine/test_step.py compares with it",
    "engine/naive.py:gradients:raw.all_reduce": "the definition itself: tests/engine/test_step.py compares with it",
    "engine/gradients.py:_gather:raw.broadcast_": "gathers what tests look at; a wrong one fails every pp case",
    "nn/float8.py:_cast:raw.all_max": "no case has float8, which hides 2.0: tests/nn/test_float8.py leaves it out",
    "nn/moe.py:_route:raw.all_to_all": "numbers of rows: a wrong one ends the transport; the rows have mutants",
    "pipeline/costs.py:measure:raw.broadcast_": "measured times, equal on all ranks: they choose a split, not a number",
    "pipeline/mail.py:_send:raw.send_start": "mutated where it is received: pipeline/mail.py:_post:raw.receive_start",
    "engine/sdc/replay.py:compare:raw.gather_list": "changes no gradient: tests/engine/test_corruption.py",
    "engine/sdc/replay.py:_from_neighbour:raw.exchange": "inputs of a check: tests/engine/test_corruption.py",
    "engine/sdc/memory.py:check:raw.all_max": "changes no gradient: tests/elastic/test_seal.py",
    "engine/sdc/memory.py:_from_replica:raw.receive_start": "brings back a tensor: tests/elastic/test_seal.py",
    "engine/sdc/memory.py:_from_replica:raw.send_start": "brings back a tensor: tests/elastic/test_seal.py",
    "engine/sdc/reductions.py:_compare:raw.all_to_all": "changes no gradient: tests/engine/test_corruption.py",
    "engine/validation.py:equal_replicas:raw.broadcast_": "makes data replicas equal at start; tested there too",
    "engine/packing.py:sum:raw.add_up": "mutated as a whole: engine/reducer.py:launch:reduce_rows",
    "engine/packing.py:gather_rows:raw.all_gather_start": "mutated as a whole: engine/zero.py and engine/zero3",
    "engine/zero3/gather_check.py:_expect:raw.receive_start": "moves no number: tests/engine/test_units.py",
    "engine/zero3/gather_check.py:_send:raw.send_start": "moves no number: tests/engine/test_units.py",
    "core/contract.py:assemble:raw.all_gather": "gathers what tests look at; a wrong one fails every tp case",
    "sequence/attend.py:gather_whole:ops.all_gather": "logits for people; tests/models/test_cp.py",
    "nn/loss.py:logits:ops.gather_for_identical_use": "logits for people; tests/models compares them with transformers",
}


@dataclass(frozen=True)
class Site:
    """A call of a communication function: the file, the function it stands in, and what it calls."""

    file: str
    function: str
    callee: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}:{self.callee}"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module("isograd." + self.file.removesuffix(".py").replace("/", "."))


def sites() -> list[Site]:
    """Every call of raw.*, ops.*, reduce_rows and gather_rows in engine, nn, sequence, contract and ops."""
    found = []
    for part in SEARCHED:
        for path in sorted((SOURCE / part).rglob("*.py")) if (SOURCE / part).is_dir() else [SOURCE / part]:
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef):
                    for call in _calls(function):
                        name = ast.unparse(call.func)
                        if re.fullmatch(r"(raw|ops)\.\w+|reduce_rows|gather_rows", name) and name not in PLAIN:
                            found.append(Site(str(path.relative_to(SOURCE)), function.name, name))
    return list(dict.fromkeys(found))


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Calls in this function and its lambdas, not in functions defined inside it."""
    todo: list[ast.AST] = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        todo += ast.iter_child_nodes(node)


Tensors = Any
Broken = Callable[..., Any]


def _remember_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Mesh, layout: Any) -> None:
        original(self, layout)
        MESH[:] = [self]

    return init


def _times(value: Tensors, factor: float) -> Tensors:
    """In the type it has: squares that are added as integers stay integers."""
    if isinstance(value, torch.Tensor):
        return (value * factor).to(value.dtype)
    return [_times(v, factor) for v in value]


def _alone(kind: str, x: torch.Tensor, group: Group, *rest: Any) -> Tensors:
    """What a member that does not communicate would get."""
    if kind in GATHERS:
        return gathered(kind, [x] * group.size)
    if kind == "all_gather":
        return torch.cat([x.repeat(2, *[1] * (x.dim() - 1))[:size] for size in rest[0]])
    if kind == "reduce_scatter":
        return x.split(list(rest[0]))[group.index].clone()
    return x


class _BrokenFlight:
    """A bucket's reduction whose result is changed when it lands."""

    def __init__(self, flight: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.flight, self.change = flight, change

    def arrived_within(self, seconds: float) -> bool:
        return bool(self.flight.arrived_within(seconds))

    def wait(self) -> list[torch.Tensor]:
        return [self.change(t) for t in self.flight.wait()]


def _own_rows(packing: Any, flat: torch.Tensor, group: Group, **_: Any) -> Any:
    return Landed([rows.clone() for rows in packing.rows(flat.split(packing.sizes)[group.index])])


def _group_of(args: tuple[Any, ...]) -> Group:
    return next(a for a in args if isinstance(a, Group))


def _reduction_ways() -> dict[str, Callable[[Broken], Broken]]:
    """Of the reduction over the data axes."""

    def changed(f: Broken, change: Callable[[torch.Tensor, Group], torch.Tensor]) -> Broken:
        return lambda *a, **k: _BrokenFlight(f(*a, **k), lambda t: change(t, _group_of(a)))

    return {
        "removed": lambda f: _own_rows,
        "doubled": lambda f: changed(f, lambda t, g: t * 2.0),
        "averaged": lambda f: changed(f, lambda t, g: t / g.size),
        "regrouped": regrouped("reduce_rows"),
        "reordered": lambda f: changed(f, lambda t, g: t.roll(1, 0)),
    }


def _nothing_gathered(*_: Any, alloc: Sequence[Callable[[], None]] = (), **__: Any) -> Handle:
    for give in alloc:
        give()
    return Handle()


def ways(site: Site) -> dict[str, Callable[[Broken], Broken]]:
    """How this call can be broken: name -> wrapper of the original."""
    kind = site.callee.split(".")[-1]
    if kind == "reduce_rows":
        return _reduction_ways()
    if kind == "gather_rows":
        return {"removed": lambda f: _nothing_gathered}
    if kind == "receive_start":
        return piped.message_ways()
    if kind == "exchange":
        return {**cut_sequences.exchange_ways(), "regrouped": regrouped(kind)}
    if site.callee.startswith("ops."):  # as wholes; their halves are mutated in comm/ops.py
        return {"doubled": lambda f: lambda *a, **k: f(*a, **k) * 2.0, "regrouped": regrouped(kind)}
    found: dict[str, Callable[[Broken], Broken]] = {
        "removed": lambda f: lambda *a, **k: _alone(kind, *a),
        "doubled": lambda f: lambda *a, **k: _times(f(*a, **k), 2.0),
        "averaged": lambda f: lambda *a, **k: _times(f(*a, **k), 1.0 / _group_of(a).size),
        "regrouped": regrouped(kind),
    }
    if kind in GATHERS:
        found["one member only"] = lambda f: lambda *a, **k: gathered(kind, [f(*a, **k)[0]] * _group_of(a).size)
    if kind in ("all_gather", "reduce_scatter"):
        found["reordered"] = lambda f: lambda *a, **k: f(*a, **k).roll(1, 0)
    if site.file == "nn/balance.py":
        del found["doubled"]  # the same: counts are used as shares, and experts under doubled numbers stay apart
    if site.file == "nn/balance.py" and kind == "all_gather":
        found["regrouped"] = regrouped("uneven all_gather")
    return found


@contextmanager
def broken_site(site: Site, way: str) -> Iterator[None]:
    """Replace `raw` or `ops` (or a function) in the module of the site, for calls from the site's function only."""
    module = site.module
    holder, _, name = site.callee.rpartition(".")
    target = getattr(module, holder) if holder else module
    original = getattr(target, name)
    wrapped = ways(site)[way](original)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        # Lambdas and comprehensions count as the function they are written in: 'copy_in.<locals>.<lambda>'.
        here = [part for part in frame.f_code.co_qualname.split(".") if not part.startswith("<")]
        return (wrapped if here[-1] == site.function else original)(*args, **kwargs)

    if holder:
        stand_in = ModuleType(holder)
        stand_in.__dict__.update(target.__dict__, **{name: chosen})
        before = getattr(module, holder)
        setattr(module, holder, stand_in)
    else:
        before = original
        setattr(module, name, chosen)
    try:
        yield
    finally:
        setattr(module, holder or name, before)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# -- debts: what `declare` writes down ------------------------------------------------------------------------------


def broken_debt(pattern: str, change: str) -> Any:
    """Every parameter whose name contains `pattern` is declared without its debts, or with one too many."""
    from isograd.engine import engine as home

    original = home.contracts

    def lying(model: Any, mesh: Mesh) -> Any:
        table = original(model, mesh)
        for name, record in table.records.items():
            if pattern in name:
                partial_over = () if change == "forgotten" else (*record.contract.partial_over, "tp")
                table.records[name] = replace(record, contract=replace(record.contract, partial_over=partial_over))
        return table

    return _patched(home, "contracts", lying)


# -- weights, norms, steps ------------------------------------------------------------------------------------------


def _totals_with(change: Callable[[Any, Any, Any], Any]) -> Any:
    """`change` is given the mesh, the table of the step and what was read from it."""
    from isograd.engine import step_status

    original = step_status.totals

    def changed(table: Any, weights: Any, mesh: Any, *more: Any) -> Any:
        return change(mesh, table, original(table, weights, mesh, *more))

    return _patched(step_status, "totals", changed)


def _mean_of_means() -> Any:
    from isograd.engine.engine import Engine

    original = Engine.backward
    return _patched(Engine, "backward", lambda self, loss, weight=1.0: original(self, loss, float(weight > 0)))


def _weight_without_seed() -> Any:
    """The weight is counted, but the loss is not multiplied by it."""
    from isograd.engine.engine import Engine

    original = Engine.backward

    def backward(self: Any, loss: Any, weight: Any = 1.0) -> None:
        original(self, loss / max(float(weight), 1.0), weight)

    return _patched(Engine, "backward", backward)


def _accumulation_divided() -> Any:
    from isograd.engine.engine import Engine

    original = Engine.backward
    return _patched(Engine, "backward", lambda self, loss, weight=1.0: original(self, loss / 3, weight))


def _last_micro_batch_only() -> Any:
    from isograd.engine.reducer import Reducer

    original = Reducer.begin_pass

    def forgetful(self: Any) -> None:
        self.finish_all()
        self.reduced.clear()
        original(self)

    return _patched(Reducer, "begin_pass", forgetful)


def _reduced_again() -> Any:
    """What earlier micro-batches have settled is doubled by every further flush."""
    from isograd.engine.reducer import Reducer

    original = Reducer.begin_pass

    def again(self: Any) -> None:
        self.finish_all()
        self.reduced.update({slot: rows * 2 for slot, rows in self.reduced.items()})
        original(self)

    return _patched(Reducer, "begin_pass", again)


def _norm(change: str) -> Any:
    from isograd.engine import norm

    if change == "replicas":
        return _patched(norm, "counted", lambda slots, mesh: list(slots))
    if change == "shards":
        return _patched(norm, "counted", lambda slots, mesh: [s for s in slots if not s.contract.shards])
    return _patched(
        norm, "counted", lambda slots, mesh: [s for s in slots if s.contract.shards or mesh.size("tp") == 1]
    )


def _counted_by_all_but_first() -> Any:
    return _patched(Contract, "is_primary_replica", lambda self, mesh: mesh.index("tp") != 0 or bool(self.shards))


def _step_scaled(way: str) -> Any:
    from isograd.engine.zero import ShardedOptimizer

    original = ShardedOptimizer.step
    if way == "clip per rank":
        return _patched(
            ShardedOptimizer,
            "step",
            lambda self, step, scale, unused: original(self, step, scale * (1 + 0.01 * MESH[0].rank), unused),
        )
    return _patched(ShardedOptimizer, "step", lambda self, step, scale, unused: original(self, step, 1.0, unused))


def _not_gathered() -> Any:
    from isograd.engine import zero

    return _patched(zero, "_gather", lambda packings, work: None)


def _bias_on_every_rank() -> Any:
    """The row bias is added before the sum, once per tp rank."""
    from isograd.nn import linear

    def forward(self: Any, x: Any) -> Any:
        return linear.reduce_output(torch.nn.functional.linear(x, self.weight, self.bias), self.mesh)

    return _patched(linear.RowLinear, "forward", forward)


def _shared_use_lost() -> Any:
    """Of a weight used twice, the second use is dropped."""
    from isograd.models.transformer import Transformer

    original = Transformer._body

    def body(self: Any, *args: Any) -> Any:
        x, sums = original(self, *args)
        return (_without_head_gradient(self, x) if self.config.tied and self.head is not None else x), sums

    return _patched(Transformer, "_body", body)


def _without_head_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.head.__dict__["_parameters"] = {
        "weight": torch.nn.Parameter(model.embed.weight.detach(), requires_grad=False)
    }
    from isograd.core.contract import contract_of

    model.head.weight._isograd_contract = contract_of(model.embed.weight)
    return x


NAMED: dict[str, Callable[[], Any]] = {
    "weight: mean of means": _mean_of_means,
    "weight: counted but not in the seed": _weight_without_seed,
    "weight: loss divided by the accumulation": _accumulation_divided,
    "weight: doubled": lambda: _totals_with(lambda mesh, _, t: replace(t, weight=t.weight * 2)),
    "weight: averaged over data ranks": lambda: _totals_with(
        lambda mesh, _, t: replace(t, weight=t.weight / mesh.size("dp cp"))
    ),
    "weight: counted by every tp rank": lambda: _totals_with(
        lambda mesh, _, t: replace(t, weight=t.weight * mesh.size("tp"))
    ),
    "weight: this rank's only": lambda: _totals_with(
        lambda mesh, table, t: replace(t, weight=max(1.0, float(table.weight[mesh.rank])))
    ),
    "weight: left out of the step": lambda: _step_scaled("no weight"),
    "accumulation: only the last micro-batch": _last_micro_batch_only,
    "accumulation: earlier micro-batches reduced again": _reduced_again,
    "norm: replicas counted on every tp rank": lambda: _norm("replicas"),
    "norm: tp shards left out": lambda: _norm("shards"),
    "norm: replicated parameters left out": lambda: _norm("replicated"),
    "norm: counted by all tp ranks but the first": _counted_by_all_but_first,
    "step: clip factor differs per rank": lambda: _step_scaled("clip per rank"),
    "step: parameters not gathered": _not_gathered,
    "layer: row bias added on every tp rank": _bias_on_every_rank,
    "layer: one use of a tied weight lost": _shared_use_lost,
    **cut_sequences.NAMED,
    **piped.NAMED,
    **sparse_mutants.NAMED,
}

FORGOTTEN = (
    "norm1",
    "norm2",
    "norm.weight",
    "out.bias",
    "down.bias",
    "positions",
    "q_norm",
    "k_norm",
    "k.weight",
    "v.weight",
    "router.weight",
    "shared_gate.weight",
)
INVENTED = ("norm1", "norm.weight", "q.weight", "embed.weight", "out.weight", "out.bias", "shared_gate.weight")


def names() -> list[str]:
    """Every mutant."""
    at_sites = [f"{site}: {way}" for site in sites() if str(site) not in EXEMPT for way in ways(site)]
    debts = [f"debt forgotten: {p}" for p in FORGOTTEN] + [f"debt invented: {p}" for p in INVENTED]
    return at_sites + debts + list(NAMED)


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """isograd with this one defect, in this process, until the block ends."""
    with _patched(Mesh, "__init__", _remember_mesh(Mesh.__init__)):
        if name in NAMED:
            context = NAMED[name]()
        elif name.startswith("debt "):
            change, _, pattern = name.removeprefix("debt ").partition(": ")
            context = broken_debt(pattern, change)
        else:
            place, _, way = name.rpartition(": ")
            context = broken_site(Site(*place.split(":")), way)
        with context:
            yield
