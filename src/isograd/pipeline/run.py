"""Runs a pipeline: this rank's actions in the order of the schedule, waiting only for what an action needs.

The engine gives the backward (it knows weights and when a gradient may travel); this file knows no optimizer. What one
device would do is `forward` of all stages in turn and one backward: tests compare with exactly that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils import _pytree as tree

from isograd.comm import world
from isograd.comm.fingerprint import ranks_unlike
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.errors import CommError, PipelineError, headline
from isograd.nn.split_backward import SplitBackward, split_linears
from isograd.pipeline.mail import Known, Mail, P2PGroups
from isograd.pipeline.schedule import Action, Schedule, Timed, build

T = TypeVar("T")
# (what the stage before passes on, micro-batch) -> what to pass on, and perhaps Terms of its own; the last stage:
# (loss, weight), or Terms
Chunk = Callable[[Any, Any], Any]
Result = tuple[Tensor, Tensor | float] | Terms


class Autograd(Protocol):
    """The state of the step. `last`: no later run of this backward reaches the same parameters."""

    def run_backward(self, roots: Sequence[Tensor], seeds: Sequence[Tensor], *, last: bool) -> None:
        """Backward from what a stage passed on, with the gradients of these roots."""
        ...

    def accepts_split_grads(self, parameter: Tensor) -> bool:
        """Whether a gradient of this parameter may come after its micro-batch's backward."""
        ...

    def accumulate_weight_grad(self, parameter: Tensor, gradient: Tensor, *, last: bool) -> None:
        """That gradient."""
        ...

    def backward_loss(self, loss: Tensor, weight: Tensor | float, *, last: bool) -> bool:
        """Backward from a micro-batch's loss on the last stage. False: nothing of it counts."""
        ...

    def backward_terms(self, terms: Terms, *, last: bool) -> bool:
        """The same of the terms of its loss."""
        ...

    def seeds_of(self, terms: Terms) -> tuple[list[Tensor], list[Tensor]]:
        """Roots and their gradients, for `run_backward`, of the terms that a stage returned with what it passes on."""
        ...


@dataclass
class _MicroBatchState:
    """What one stage keeps of a micro-batch between its forward and its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    loss: Result | None  # of the last stage
    terms: Terms | None  # of another stage, which seeds them: no value of a term is passed on
    split: SplitBackward | None

    def drop(self) -> None:
        """Gradients that its backward has made count for nothing, here and on earlier stages."""
        for tensor in self.inputs:
            tensor.grad = None
        if self.split is not None:
            self.split.discard()


class Pipeline:
    """The stages of this rank, and the way through all of them."""

    def __init__(
        self,
        model: nn.Module,
        chunks: Mapping[int, Chunk],
        mesh: Mesh,
        refuse: Callable[[Any], None] = lambda micro: None,
    ) -> None:
        """chunks: the stages of this rank, which are parts of `model`.
        `refuse` raises for a micro-batch that some stage cannot run; all ranks of a column ask before any runs."""
        self.model = model
        self.chunks, self.mesh, self.layout, self._refuse = chunks, mesh, mesh.layout, refuse
        self.group, self.p2p = mesh.group("pp"), P2PGroups.of_mesh(mesh)
        self.last = self.layout.pp * self.layout.vpp - 1
        self.timeline: list[Timed] = []  # of the latest step, without the time spent waiting for others
        self._known: Known = {}

    def train(self, micros: Sequence[Any], autograd: Autograd) -> None:
        """Forward and backward of every micro-batch, which `refuse` has passed."""
        schedule = build(self.layout.schedule, self.layout.pp, self.layout.vpp, len(micros))
        with split_linears(self.model) if schedule.name == "zb" else nullcontext():
            self._run(_Step(self, schedule, micros, self._known, autograd))

    def evaluate(self, micros: Sequence[Any]) -> list[Result]:
        """Forwards only, under no_grad: the (loss, weight) or the terms that stages of this rank returned."""
        layout = self.layout
        whole = build("gpipe", layout.pp, layout.vpp, len(micros))
        forwards = tuple(tuple(a for a in order if a.kind == "F") for order in whole.orders)
        self.refuse(micros, trains=False)
        schedule = Schedule("forward", layout.pp, layout.vpp, len(micros), forwards)
        # Evaluating needs no gradients, so what stages pass on has another form than in training.
        with torch.no_grad():
            return self._run(_Step(self, schedule, micros, known={}))

    def _run(self, step: _Step) -> list[Result]:
        try:
            step.run()
        except BaseException as error:
            # Neighbours wait for a message that will not come. Leaving closes the connections, which tells them.
            step.mail.drop()
            world.leave(f"its pipeline failed: {headline(error)}")
            raise
        self.timeline = step.timeline
        return step.losses

    def refuse(self, micros: Sequence[Any], trains: bool = True) -> None:
        """Before `train`, on all pp ranks of a column: all train, on micro-batches of the same shapes (contents are
        compared at the step: core/input_checks.py), and each can run on all stages."""
        shapes = torch.tensor([hash(tuple(map(shapes_of, micros))) >> 1, len(micros), trains])
        unlike = ranks_unlike(shapes, self.mesh.host_group("pp"))
        if unlike:
            does = "to train on" if trains else "to evaluate"
            raise PipelineError("IG804", where=self.mesh.describe_rank(), count=len(micros), does=does, unlike=unlike)
        for micro in micros:
            self._refuse(micro)


class _Step:
    """One pass through the schedule on this rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        micros: Sequence[Any],
        known: Known,
        autograd: Autograd | None = None,
    ) -> None:
        self.pipeline, self.schedule, self.micros, self._autograd = pipeline, schedule, micros, autograd
        self.order = schedule.orders[pipeline.group.index]
        shapes = [shapes_of(micro) for micro in micros]
        self.mail = Mail(schedule, pipeline.p2p, pipeline.mesh.device, known, shapes)
        self.held: dict[tuple[int, int], _MicroBatchState] = {}
        self.losses: list[Result] = []
        self.timeline: list[Timed] = []
        self.final = {(a.kind, a.stage): a for a in self.order}  # the last of each kind on each stage

    def run(self) -> None:
        do = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        _in_doubt(self.mail.look_ahead, self.pipeline.mesh)
        for action in self.order:
            source = next((need for need in self.schedule.needs(action) if need.stage != action.stage), None)
            arrived = _in_doubt(partial(self.mail.receive, source), self.pipeline.mesh) if source else []
            began = time.perf_counter()
            with record_function(f"isograd: {action.kind} of stage {action.stage}, micro-batch {action.micro}"):
                do[action.kind](action, arrived)
            self.timeline.append(Timed(action, began, time.perf_counter()))
            _in_doubt(self.mail.look_ahead, self.pipeline.mesh)
        _in_doubt(self.mail.finish, self.pipeline.mesh)

    def _forward(self, action: Action, inputs: list[Tensor]) -> None:
        micro = self.micros[action.micro]
        split = None
        if self._autograd is not None and self.schedule.name == "zb":  # weights' gradients are delayed
            split = SplitBackward(self.pipeline.model.parameters(), self._autograd.accepts_split_grads)
        with split or nullcontext():
            passed = None if not inputs else inputs[0] if len(inputs) == 1 else tuple(inputs)
            result = self.pipeline.chunks[action.stage](passed, micro)
        if action.stage == self.pipeline.last:
            loss: Result = result if isinstance(result, Terms) else _pair(result)
            if self._autograd is None:
                self.losses.append(loss)
            else:
                self.held[action[1:]] = _MicroBatchState(inputs, [], loss, None, split)
            return
        terms: Terms | None = None
        if isinstance(result, tuple) and len(result) > 1 and isinstance(result[-1], Terms):  # after what it passes on
            result, terms = (result[0] if len(result) == 2 else result[:-1]), result[-1]
        outputs = _checked(result, action.stage, self.pipeline.mesh)
        _in_doubt(lambda: self.mail.send(action, outputs), self.pipeline.mesh)
        if self._autograd is not None:
            self.held[action[1:]] = _MicroBatchState(inputs, outputs, None, terms, split)
        elif terms is not None:
            self.losses.append(terms)

    def _backward(self, action: Action, gradients: list[Tensor]) -> None:
        assert self._autograd is not None
        held = self.held[action[1:]]
        last = self.final[action.kind, action.stage] is action
        with held.split or nullcontext():
            if held.loss is not None:
                if isinstance(held.loss, Terms):
                    counts = self._autograd.backward_terms(held.loss, last=last)
                else:
                    counts = self._autograd.backward_loss(*held.loss, last=last)
                if not counts:  # it ran for the other ranks' sake, and may have made NaN
                    held.drop()
            else:
                roots, seeds = [t for t in held.outputs if t.requires_grad], gradients
                if held.terms is not None:
                    values, shares = self._autograd.seeds_of(held.terms)
                    roots, seeds = roots + values, seeds + shares
                self._autograd.run_backward(roots, seeds, last=last)
        if action.stage:
            back = [torch.zeros_like(t) if t.grad is None else t.grad for t in held.inputs if t.requires_grad]
            _in_doubt(lambda: self.mail.send(action, back), self.pipeline.mesh)
        held.inputs, held.outputs = [], []  # the weights' gradients need no graph
        held.loss = held.terms = None
        if action.kind == "B":
            del self.held[action[1:]]

    def _weights(self, action: Action, _: list[Tensor]) -> None:
        split, last = self.held.pop(action[1:]).split, self.final["W", action.stage] is action
        assert split is not None
        assert self._autograd is not None
        for weight, gradient in split.weight_grads():
            self._autograd.accumulate_weight_grad(weight, gradient, last=last)


def _in_doubt(wait: Callable[[], T], mesh: Mesh) -> T:
    """Waiting for others ends in an error that names the one that has gone."""
    try:
        return wait()
    except CommError as error:
        raise PipelineError("IG805", seen=error.seen or headline(error), where=mesh.describe_rank()) from error


def shapes_of(micro: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of all tensors of a micro-batch."""
    return tuple(tuple(t.shape) for t in tree.tree_leaves(micro) if isinstance(t, Tensor))


def _pair(result: Any) -> tuple[Tensor, Tensor | float]:
    loss, weight = result
    return loss, weight


def _checked(result: Any, stage: int, mesh: Mesh) -> list[Tensor]:
    outputs = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple) else []
    if not outputs or not all(isinstance(t, Tensor) for t in outputs):
        raise PipelineError("IG801", seen=type(result).__name__, where=mesh.describe_rank(), stage=stage)
    return outputs
