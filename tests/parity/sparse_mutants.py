"""Mutants of experts: their debts, scales, counts and scores. tests/engine/test_experts_mutants.py has the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from isograd.core.contract import Contract
from isograd.core.mesh import DATA, EXPERT_DATA, Mesh


def _of_experts(change: Callable[[Contract], Contract]) -> Any:
    """Contracts of experts as the engine reads them."""
    from isograd.engine import engine

    original = engine.contracts

    def contracts(model: Any, mesh: Mesh) -> Any:
        table = original(model, mesh)
        for name, record in table.records.items():
            if record.contract.data == EXPERT_DATA:
                table.records[name] = replace(record, contract=change(record.contract))
        return table

    return patch.object(engine, "contracts", contracts)


def _gradient_times(factor: Callable[[Mesh], float]) -> Any:
    """What leaves a rank's backward for an expert."""
    from isograd.engine.step import StepState

    original = StepState.collect

    def collect(self: Any, slot: Any, gradient: torch.Tensor) -> None:
        scale = factor(self.mesh) if slot.contract.data == EXPERT_DATA else 1.0
        original(self, slot, gradient * scale)

    return patch.object(StepState, "collect", collect)


def _norm(keep: Callable[[Any, Mesh], bool]) -> Any:
    from isograd.engine import norm

    original = norm.counted
    return patch.object(norm, "counted", lambda slots, mesh: [s for s in original(slots, mesh) if keep(s, mesh)])


def _scores_of_other_ranks_slots() -> Any:
    """A score gets a gradient from the slots that this rank's own experts computed, and from no others."""
    from isograd.nn.moe import MoE

    original = MoE._through

    def through(self: Any, x: torch.Tensor, weights: torch.Tensor, route: Any) -> torch.Tensor:
        ep = self.mesh.group("ep")
        own = route.indices // (self.options.number // ep.size) == ep.index
        return original(self, x, torch.where(own, weights, weights.detach()), route)

    return patch.object(MoE, "_through", through)


def _terms_weighed(factor: Callable[[Mesh], float]) -> Any:
    """The balance of experts, in the loss that is seeded."""
    from isograd.models.transformer import Transformer

    original = Transformer._expert_terms

    def terms(self: Any, sums: Any, tokens: int) -> Any:
        found = original(self, sums, tokens)
        return {name: (value * factor(self.mesh), weight, share) for name, (value, weight, share) in found.items()}

    return patch.object(Transformer, "_expert_terms", terms)


def _bias_twice() -> Any:
    from isograd.nn.moe import MoE

    original = MoE._committed

    def committed(self: Any, counts: torch.Tensor) -> None:
        original(self, counts)
        original(self, counts)

    return patch.object(MoE, "_committed", committed)


def _every_forward_counts() -> Any:
    """Evaluation counts, too."""
    from isograd.core.step_counters import StepCounter

    def add(self: Any, counts: torch.Tensor, training: bool, result: torch.Tensor) -> None:
        self.local = counts if self.local is None else self.local + counts

    return patch.object(StepCounter, "add", add)


def _first_micro_batch_counts() -> Any:
    from isograd.core.step_counters import StepCounter

    def add(self: Any, counts: torch.Tensor, training: bool, result: torch.Tensor) -> None:
        if (self.counting or (training and torch.is_grad_enabled())) and self.local is None:
            self.local = counts

    return patch.object(StepCounter, "add", add)


NAMED: dict[str, Callable[[], Any]] = {
    "experts: reduced over dp and cp": lambda: _of_experts(lambda c: replace(c, data=DATA)),
    "experts: tp owed beside edp": lambda: _of_experts(lambda c: replace(c, partial_over=("tp",))),
    "experts: times ep": lambda: _gradient_times(lambda mesh: mesh.size("ep")),
    "experts: divided by ep": lambda: _gradient_times(lambda mesh: 1 / mesh.size("ep")),
    "experts: divided by edp": lambda: _gradient_times(lambda mesh: 1 / mesh.size("edp")),
    "experts: left out of the norm": lambda: _norm(lambda slot, mesh: slot.contract.data == DATA),
    "experts: those of the first ep rank in the norm": lambda: _norm(
        lambda slot, mesh: slot.contract.data == DATA or mesh.index("ep") == 0
    ),
    "experts: no gradient to scores of other ranks' slots": _scores_of_other_ranks_slots,
    "experts: balance times the data ranks": lambda: _terms_weighed(lambda mesh: mesh.size("dp cp")),
    "experts: balance divided by tp": lambda: _terms_weighed(lambda mesh: 1 / mesh.size("tp")),
    "experts: bias moved twice in a step": _bias_twice,
    "experts: evaluation counts": _every_forward_counts,
    "experts: the first micro-batch counts": _first_micro_batch_counts,
}
