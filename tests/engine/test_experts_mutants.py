"""What the engine does for experts, broken on purpose one move at a time: each defect gives a wrong number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from isograd.core.contract import Contract
from isograd.core.contract_table import ContractTable
from isograd.core.mesh import DATA, EXPERT_DATA, Mesh
from isograd.engine import engine, norm, reducer, step_status, validation, zero
from isograd.engine.plan import Plan
from isograd.engine.zero3 import param_group as units
from tests.parity.mutants import _BrokenFlight, _own_rows

from . import folded


def as_if_dense(table: ContractTable) -> ContractTable:
    """Experts owe dp and cp, like everything else."""
    records = [replace(r, contract=replace(r.contract, data=DATA)) for r in table]
    return ContractTable(records, table.mesh)


def scaled(factor: Callable[[Any], float]) -> Any:
    original = reducer.reduce_rows

    def reduce_rows(slots: Any, gradients: Any, group: Any, **options: Any) -> Any:
        flight = original(slots, gradients, group, **options)
        if group.axes != EXPERT_DATA:
            return flight
        return _BrokenFlight(flight, lambda rows: rows * factor(group))

    return patch.object(reducer, "reduce_rows", reduce_rows)


def without_experts(module: Any, name: str, instead: Callable[..., Any]) -> Any:
    """A move of rows that is left out where experts' owners would run it."""
    original = getattr(module, name)

    def moved(packing: Any, *of: Any, **options: Any) -> Any:
        return (instead if packing.owners.axes == EXPERT_DATA else original)(packing, *of, **options)

    return patch.object(module, name, moved)


def by_owners(table: Any, plan: Plan, mesh: Mesh) -> Any:
    """A parameter was used if one of the owners of its rows used it."""
    used = [bool(table.used[list(slot.owners.ranks), i].any()) for i, slot in enumerate(plan.slots)]
    return table.used.new_tensor(used)


def dense_contracts(original: Any, model: Any, mesh: Mesh) -> ContractTable:
    return as_if_dense(original(model, mesh))


def equal_replicas(original: Any, model: Any, table: ContractTable, mesh: Mesh) -> None:
    original(model, as_if_dense(table), mesh)


def no_rows(*_: Any, alloc: Sequence[Callable[[], None]] = (), **__: Any) -> Any:
    from isograd.comm.handle import Handle

    for give in alloc:
        give()
    return Handle()


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "experts are reduced over dp and cp": (
        "dp4 ep2",
        lambda: patch.object(engine, "contracts", partial(dense_contracts, engine.contracts)),
    ),
    "experts are not reduced": ("dp4 ep2 zero1", lambda: without_experts(reducer, "reduce_rows", _own_rows)),
    "experts are averaged over edp": ("dp4 ep2", lambda: scaled(lambda group: 1 / group.size)),
    "experts are multiplied by ep": ("dp4 ep2", lambda: scaled(lambda group: 4 / group.size)),
    "experts are divided by ep": ("dp4 ep2 zero2", lambda: scaled(lambda group: group.size / 4)),
    "the norm leaves experts out": (
        "dp2 tp2 ep4",
        lambda: patch.object(norm, "counted", lambda slots, _: [s for s in slots if s.contract.data == DATA]),
    ),
    "the norm counts the experts of one ep rank": (
        "dp2 tp2 ep2",
        lambda: patch.object(
            Contract, "is_primary_replica", lambda self, mesh: mesh.index(self.model_parallel_axis) == 0
        ),
    ),
    "the norm counts experts on the first tp rank": (
        "dp2 tp2 ep4",
        lambda: patch.object(Contract, "is_primary_replica", lambda self, mesh: mesh.index("tp") == 0),
    ),
    "copies start as those of the first data rank": (
        "dp4 ep2",
        lambda: patch.object(validation, "equal_replicas", partial(equal_replicas, validation.equal_replicas)),
    ),
    "a rank whose experts nobody chose does not step them": (
        "dp2 tp2 ep4",
        lambda: patch.object(step_status, "used_anywhere", by_owners),
    ),
    "stepped rows of experts are not gathered": (
        "dp4 ep2 zero1",
        lambda: without_experts(zero, "gather_rows", no_rows),
    ),
    "rows of experts are not gathered at ZeRO 3": (
        "dp4 ep2 zero3",
        lambda: without_experts(units, "gather_rows", no_rows),
    ),
}


def wrong_under(name: str | None, layout: str) -> list[str]:
    if name is None:
        outcome = folded.train(layout, 1)
    else:
        with MUTANTS[name][1]():
            outcome = folded.train(layout, 1)
    return folded.differences(outcome, folded.one_device(Mesh(layout).size(DATA)))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_in_what_experts_owe_gives_a_wrong_number(worlds, name: str) -> None:
    layout = MUTANTS[name][0]
    found = worlds(4).run(wrong_under, name, layout)
    assert any(found), f"nothing is wrong where {name}"
    assert worlds(4).run(wrong_under, None, layout) == [[]] * 4
