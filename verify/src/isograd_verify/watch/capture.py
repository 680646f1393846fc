"""Watches one rank of a running program, without changing it, and writes its part of a recording.

In the optimizer steps that are watched it notes events in order (record/events.py has every kind), and as tensors, per
step: `part/MICRO/NAME`, the sketch of what one backward added to a parameter on this rank, before any communication;
`final/NAME` and `sum/NAME`, the gradient before clip and its sketch; `clipped/NAME`, the sketch of what the optimizer
received; `parameter/NAME` before and `after/NAME` behind the step; and when `activations` is set,
`in|out|back/MICRO/NUMBER/MODULE#CALL`. How each is obtained is told beside each hook in hooks.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from isograd_verify.record.events import Backward, ForwardInputs, Parameter, Step, micro_of
from isograd_verify.record.sketch import digest, dtype_name, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.collectives import WatchMode
from isograd_verify.watch.fused import Fused
from isograd_verify.watch.hooks import Hooks
from isograd_verify.watch.labels import Labels
from isograd_verify.watch.life import Steps
from isograd_verify.watch.recorder import Recorder, gradient_of, number_of
from isograd_verify.watch.rewritten import Rewrites
from isograd_verify.watch.routing import Routing

LIMIT = 1 << 28  # bytes of full gradients, parameters and activations that a rank writes per step
MOST_MICROS = 512  # backwards without an optimizer step, after which nothing more is expected


class Capture(Recorder):
    """`steps`: which are watched (life.Steps). `parameters`: write these and gradients as a whole, too: only `verify
    compare` needs more than sketches. `lenient`: an error of the capture's own ends the watching, and is told, instead
    of ending the program. `replay`: a recording whose choices of experts are taken (routing.py). `beyond`: tensors of
    more elements are kept by sketches alone (recorder.Sketching)."""

    watch: WatchMode
    hooks: Hooks

    def __init__(
        self,
        directory: str | Path,
        steps: int | str = 3,
        activations: bool = False,
        limit: int = LIMIT,
        parameters: bool = True,
        lenient: bool = False,
        replay: Path | None = None,
        beyond: int | None = None,
    ) -> None:
        super().__init__(Path(directory), lenient, limit, parameters, beyond)
        self.steps, self.activations = Steps.of(steps), activations
        self.labels, self.fused = Labels(self), Fused(self)
        self.routing = Routing(self, replay)
        self.rewrites = Rewrites(self)
        self.watch = WatchMode(self, self.labels, self.rewrites, self.routing)
        self.hooks = Hooks(self, self.watch, self.fused, self.routing)

    def backward_begins(self, roots: list[Tensor], scaled: int = 0) -> None:
        """A call of autograd.backward begins: one more micro-batch. `scaled`: as in the event."""
        self.close_step()
        if not self.active:
            return
        added = [p for n, p in self.learn_names().items() if n in self.part_shapes] if self.micro >= 0 else []
        held = [p.held if isinstance(p, foreign.FlatPiece) else p.grad for p in added]
        if added and not any(g is not None and bool(foreign.local(g).any()) for g in held):  # gradients thrown away
            self.cleared = self.micro + 1
            if self.snapped:  # the norm was looked at, and the step left out: as after an overflow
                self.drop_before(self.cleared)
        if self.micro + 1 >= MOST_MICROS:
            self.leftover()
            self.pause()
            return
        self.micro += 1
        self.backwards += 1
        self.rewrites.begin()
        if self.last_step_at < 0:
            self.held = [root() for _, root in self.roots]
        self.snapped = False
        summed = bool(roots) and all(map(self.watch.means.is_sum, roots))
        at, loss = foreign.call_site(self.base), self.reduced
        self.event(Backward(*self.now, site=at, loss=loss, summed=summed, scaled=scaled))
        self.reduced = ""

    def drop_before(self, micro: int) -> None:
        """Forgets what backwards before this micro-batch added: their gradients were thrown away."""
        for path in [k for k in self.tensors if (n := number_of(k)) is not None and micro_of(n) < micro]:
            del self.tensors[path]

    def snapshot(self, gradients: dict[str, Tensor] | None = None, talk: bool = True) -> None:
        """The gradients as they are before clip. `gradients`: whole ones that an engine gives by name, not `grad`.
        `talk`: the other ranks are here too, so a DTensor may be brought into place."""
        if self.snapped:
            return
        self.snapped = True
        if any(getattr(p, "main_grad", None) is not None for p in self.learn_names().values()):
            raise RuntimeError(
                "gradients are kept in main_grad, as by Megatron-Core's DistributedDataParallel and distributed "
                "optimizer, which is not understood"
            )
        self.before = {}
        for name, parameter in self.learn_names().items():
            flat = foreign.local(parameter).detach().reshape(-1)
            constant = flat.numel() == 0 or bool((flat[:64] == flat[0]).all() and (flat == flat[0]).all())
            self.before[name] = {"before": digest(flat), "constant": constant}
        for name, parameter in self.learn_names().items():
            gradient = gradients.get(name) if gradients is not None else parameter.grad
            if gradient is None or (not talk and foreign.misplaced(parameter, gradient)):
                continue
            self.gradient(name, parameter, gradient)
        self.guarded(self.rewrites.write_early, "changes")()

    def before_step(self, owned: list[Tensor], rates: list[float | None]) -> None:
        """An optimizer is about to step. Several that step without a backward in between belong to one step."""
        self.held.clear()
        self.learn_names()
        self.owned |= {name for p in owned for name in self._names_of(p)}
        for i, one in enumerate(owned):  # that no module call has named (a loss's temperature, say)
            if not self._names_of(one) and not foreign.joined():
                self.names[one] = f"parameter_{i}"  # by its place
            elif not self._names_of(one) and one.grad is not None:
                self.nameless[id(one)] = one.numel()
        self.rates |= {name: rate for p, rate in zip(owned, rates, strict=True) for name in self._names_of(p)}
        if self.last_step_at == self.backwards and self.last_step_at >= 0:
            return
        clipped = self.snapped  # else the gradients are as the snapshot has just seen them
        self.snapshot()
        for name, parameter in self.learn_names().items():
            part = foreign.local(parameter)
            if self.parameters:
                self.keep(f"parameter/{name}", part, parameter)
            if parameter.grad is not None and not clipped and f"sum/{name}" in self.tensors:
                self.tensors[f"clipped/{name}"] = self.tensors[f"sum/{name}"].clone()  # a file of its own memory
            elif parameter.grad is not None:
                gradient = foreign.local(parameter.grad)
                self.tensors[f"clipped/{name}"] = sketch(gradient, self.offset(name, parameter, gradient))

    def _names_of(self, parameter: Tensor) -> list[str]:
        """The names of a parameter: of a flat one's, each."""
        name = self.names.get(parameter)
        return list(self.inside.get(parameter, [name] if name else []))

    def after_step(self) -> None:
        """An optimizer has stepped; with a single one, the step is over."""
        if self.last_step_at != self.backwards or self.last_step_at < 0:
            self.last_step_at = self.backwards
            self.unsettled = True
        if len(self.optimizers) < 2:
            self.close_step()
        else:  # the program may end before it is over, and its model with it
            self.held = [root() for _, root in self.roots]

    def close_step(self) -> None:
        """The step is over: at once, or with several optimizers when the next forward or backward begins."""
        if not self.unsettled:
            return
        self.unsettled = False
        # What an optimizer that did not step holds is no gradient of this step.
        self.waiting = {
            n for n, p in self.learn_names().items() if n not in self.owned and foreign.owner(p) in self.belongs
        }
        for path in [k for k in self.tensors if gradient_of(k) in self.waiting]:
            del self.tensors[path]
        self._finish_step("")
        self.held.clear()

    def leftover(self) -> None:
        """The last backwards of a program that never stepped; one that breaks off after a step proves nothing."""
        self.drop_before(self.cleared)
        self.snapshot(talk=False)
        self._finish_step("no optimizer stepped after the last backward")

    def _finish_step(self, note: str) -> None:
        about: dict[str, Parameter] = {}
        for name, parameter in self.learn_names().items():
            part = foreign.local(parameter)
            if self.parameters:
                self.keep(f"after/{name}", part, parameter)
            box, whole = self.boxes.get(name) or (foreign.box_of(parameter), foreign.whole_shape(parameter))
            piece = isinstance(parameter, foreign.FlatPiece)
            part_shape = self.part_shapes.get(name, whole if piece else tuple(part.shape))
            about[name] = Parameter(
                shape=tuple(part.shape),
                whole=whole,
                box=box,
                declared=isinstance(parameter, foreign.DTensor | foreign.FlatPiece),
                dtype=dtype_name(part),
                trainable=parameter.requires_grad and name not in self.waiting,
                owned=name in self.owned or foreign.owner(parameter) in self.belongs,
                **(self.gradients[name] if f"sum/{name}" in self.tensors else {}),
                gradient=f"sum/{name}" in self.tensors,
                finite=bool(self.tensors[f"sum/{name}"].isfinite().all()) if f"sum/{name}" in self.tensors else True,
                hash=digest(part),
                part_shape=part_shape,
                part_box=self.part_boxes.get(name) if torch.Size(part_shape).numel() > part.numel() else None,
                rate=self.rates.get(name),
                **self.before.get(name, {}),
            )
        for forward, tensors in self.unreached.values():
            self.event(ForwardInputs(*self.now, forward=forward, tensors=tensors, reached=False))
        self.unreached.clear()
        left = {"limit": self.limit, **self.left_out} if self.left_out else {}
        by_hand = bool(not note and not self.optimizers and self.rewrites.by_hand)
        self.event(Step(
            *self.now, parameters=about, backwards=self.backwards, note=note, left_out=left, by_hand=by_hand,
            nameless=len(self.nameless), issued=foreign.issued(),
        ))  # fmt: skip
        self.out.tensors(self.step, self.tensors)
        self.tensors, self.written = {}, 0
        of_step = (self.left_out, self.storages, self.owned, self.nameless, self.rates, self.waiting)
        for held in (*of_step, self.watch.flows.marks, self.watch.states):
            held.clear()
        self.step, self.micro, self.snapped, self.cleared = self.step + 1, -1, False, 0
        if not self.steps.watches(self.step):
            self.pause()
