"""Mutants of pipelines: messages lost or changed on their way, backwards and weights dropped or doubled, ties and norms
counted wrongly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from isograd.comm.group import Group
from isograd.comm.handle import Handle

from .regrouped import MESH

Broken = Callable[..., Any]


def _ties(change: str) -> Any:
    """What a tie's members do with their copies' gradients."""
    from isograd.engine.step import StepState

    original = StepState._all_reduce_partials

    def pay(self: Any, axes: str, slots: Any, due: Any) -> None:
        if not axes.startswith("pp"):
            return original(self, axes, slots, due)
        if change == "last use lost" and self.mesh.index("pp"):
            due.update({slot: torch.zeros_like(due[slot]) for slot in slots})
        if change != "forgotten":
            original(self, axes, slots, due)
        if change == "twice":
            original(self, axes, slots, due)
        return None

    return patch.object(StepState, "_all_reduce_partials", pay)


def _returned(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Any:
    """The gradients of a stage's inputs, as they are sent back."""
    from isograd.pipeline.mail import Mail

    original = Mail.send

    def send(self: Any, action: Any, tensors: Any) -> None:
        original(self, action, tensors if action.kind == "F" else change(list(tensors)))

    return patch.object(Mail, "send", send)


def _forward_shuffled() -> Any:
    from isograd.pipeline.mail import Mail

    original = Mail.send

    def send(self: Any, action: Any, tensors: Any) -> None:
        changed = [t.detach().roll(1, 0).requires_grad_(t.requires_grad) for t in tensors]
        original(self, action, changed if action.kind == "F" else tensors)

    return patch.object(Mail, "send", send)


def _last_backward_dropped() -> Any:
    """The last micro-batch's backward of the first stage."""
    from isograd.pipeline.run import _Step

    original = _Step._backward

    def backward(self: Any, action: Any, gradients: Any) -> None:
        if action.stage == 0 and action.micro == len(self.micros) - 1:
            return
        original(self, action, gradients)

    return patch.object(_Step, "_backward", backward)


def _weights_run(times: int) -> Any:
    from isograd.nn.split_backward import SplitBackward

    original = SplitBackward.weight_grads

    def weight_grads(self: Any) -> Any:
        found = list(original(self))
        for _ in range(times):
            yield from [(weight, gradient.clone()) for weight, gradient in found]

    return patch.object(SplitBackward, "weight_grads", weight_grads)


def _weights_of_another_input() -> Any:
    """What a weight gradient keeps is overwritten by the next micro-batch's."""
    from isograd.nn.split_backward import SplitBackward

    original, latest = SplitBackward._collect, {}

    def collect(self: Any, weight: Any, x: Any, dy: Any) -> None:
        before = latest.get(id(weight))
        latest[id(weight)] = x
        original(self, weight, x if before is None or before.shape != x.shape else before, dy)

    return patch.object(SplitBackward, "_collect", collect)


def _norm_of_own_stage() -> Any:
    from isograd.engine import norm

    original = norm.global_norm

    def own(norms: Any, world: Group, device: Any) -> float:
        data_and_tensor = MESH[0].group("dp cp tp")
        return original(norms, data_and_tensor, device)

    return patch.object(norm, "global_norm", own)


def _tie_counted_on_every_stage() -> Any:
    from isograd.core.contract import Contract

    original = Contract.is_primary_replica

    def counted(self: Any, mesh: Any) -> bool:
        return original(replace(self, partial_over=tuple(a for a in self.partial_over if not a.startswith("pp"))), mesh)

    return patch.object(Contract, "is_primary_replica", counted)


def _tie_counted_nowhere() -> Any:
    from isograd.core.contract import Contract

    original = Contract.is_primary_replica
    return patch.object(Contract, "is_primary_replica", lambda self, mesh: not self.ties and original(self, mesh))


def _loss_weight(change: Callable[[Any, int], Any]) -> Any:
    """Of the losses that a pipeline's last stage seeds."""
    from isograd.engine.step import StepState

    original = StepState.backward_loss
    return patch.object(
        StepState,
        "backward_loss",
        lambda self, loss, weight, last=True: original(self, loss, change(weight, self.mesh.rank), last=last),
    )


def _travels_too_early() -> Any:
    """Every backward of a stage lets its gradients travel, and what arrives replaces what had arrived before."""
    from isograd.engine.reducer import Reducer
    from isograd.engine.step import StepState

    run, delayed = StepState.run_backward, StepState.accumulate_weight_grad
    stack = ExitStack()
    stack.enter_context(patch.object(Reducer, "_add", _replacing))
    stack.enter_context(
        patch.object(StepState, "run_backward", lambda self, roots, seeds, last=True, **k: run(self, roots, seeds, **k))
    )
    stack.enter_context(
        patch.object(
            StepState, "accumulate_weight_grad", lambda self, weight, grad, last: delayed(self, weight, grad, last=True)
        )
    )
    return stack


def _replacing(self: Any, bucket: Any, rows: Any) -> None:
    self.reduced.update(zip(bucket.slots, rows, strict=True))


def _loss_of_the_first_stage() -> Any:
    """Weights and losses are read from the first stage, which has none."""
    from isograd.engine import step_status

    def of_data(table: torch.Tensor, mesh: Any) -> torch.Tensor:
        return table[list(mesh.layout.ranks("dp cp", mesh.layout.rank({**mesh.coordinates, "pp": 0})))]

    return patch.object(step_status, "of_data", of_data)


def _stages_swapped() -> Any:
    """Each rank's chunks run in the wrong order."""
    from isograd.models.transformer import Transformer

    original = Transformer._body

    def body(self: Any, x: Any, stream: Any, numbers: range) -> Any:
        return original(self, x, stream, numbers[::-1])

    return patch.object(Transformer, "_body", body)


def _blocks_numbered_from_zero() -> Any:
    """Dropout is drawn by the number a block has on its rank."""
    from isograd.models import transformer

    original = transformer._for_block
    return patch.object(transformer, "_for_block", lambda stream, number: original(stream, number % 2))


def _used_by_own_stage_only() -> Any:
    from isograd.engine import step_status

    return patch.object(
        step_status, "used_anywhere", lambda table, plan, mesh: torch.zeros(len(plan.slots), dtype=torch.bool)
    )


def message_ways() -> dict[str, Callable[[Broken], Broken]]:
    """Of what is received from a neighbour: (tensors, group, peer, tag) -> a handle. Headers are left as they are."""

    def landed(f: Broken, change: Callable[[torch.Tensor], torch.Tensor]) -> Broken:
        def broken(tensors: Any, group: Group, peer: int, *tag: int, **more: Any) -> Handle:
            handle = f(tensors, group, peer, *tag, **more)

            def finish() -> None:
                handle.wait()
                with torch.no_grad():
                    for t in tensors:
                        if t.is_floating_point():
                            t.copy_(change(t))

            return Handle().and_then(finish)

        return broken

    return {
        "removed": lambda f: landed(f, torch.zeros_like),
        "doubled": lambda f: landed(f, lambda t: t * 2.0),
        "averaged": lambda f: landed(f, lambda t: t / 2.0),
        "reordered": lambda f: landed(f, lambda t: t.roll(1, 0)),
    }


NAMED: dict[str, Callable[[], Any]] = {
    "pipeline: the debt of a tie forgotten": lambda: _ties("forgotten"),
    "pipeline: the last stage's use of a tie lost": lambda: _ties("last use lost"),
    "pipeline: a tie summed twice": lambda: _ties("twice"),
    "pipeline: a tie counted in the norm by every stage": _tie_counted_on_every_stage,
    "pipeline: a tie counted in the norm by none": _tie_counted_nowhere,
    "pipeline: the gradient of a stage's input doubled": lambda: _returned(lambda g: [t * 2.0 for t in g]),
    "pipeline: the gradient of a stage's input lost": lambda: _returned(lambda g: [torch.zeros_like(t) for t in g]),
    "pipeline: the gradient of a stage's input permuted": lambda: _returned(lambda g: [t.roll(1, 0) for t in g]),
    "pipeline: what a stage passes on permuted": _forward_shuffled,
    "pipeline: the last micro-batch's backward of a stage dropped": _last_backward_dropped,
    "pipeline: weight gradients put off and never made": lambda: _weights_run(0),
    "pipeline: weight gradients put off and made twice": lambda: _weights_run(2),
    "pipeline: weight gradients made of another micro-batch's input": _weights_of_another_input,
    "pipeline: clipped by the norm of one's own stage": _norm_of_own_stage,
    "pipeline: the weight of a loss lost": lambda: _loss_weight(lambda weight, rank: float(weight > 0)),
    "pipeline: loss and weight read from the first stage": _loss_of_the_first_stage,
    "pipeline: earlier micro-batches overwritten by the last to travel": _travels_too_early,
    "pipeline: a rank's layers in reverse": _stages_swapped,
    "pipeline: dropout drawn by a block's place on its rank": _blocks_numbered_from_zero,
    "pipeline: parameters taken for unused": _used_by_own_stage_only,
}
