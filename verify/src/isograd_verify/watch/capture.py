"""Watches one rank of a running program, without changing it, and writes its part of a recording.

    with Capture(directory, steps=3):
        train()                       # any program: plain, DDP, FSDP2, DTensor, DeepSpeed, isograd

In the optimizer steps that are watched (steps.py) it notes events in order (record/events.py has every kind),
and as tensors, per step: `part/MICRO/NAME`, the sketch of what one backward added to a parameter on this rank, before
any communication; `final/NAME` and `sum/NAME`, the gradient before clip and its sketch; `clipped/NAME`, the sketch of
what the optimizer received; `parameter/NAME` before and `after/NAME` behind the step; and when `activations` is set,
`in|out|back/MICRO/NUMBER/MODULE#CALL`. How each is obtained is told beside each hook in hooks.py.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from isograd_verify.record.events import (
    Backward,
    Changed,
    Coefficient,
    Collective,
    End,
    ForwardInputs,
    GivenTensor,
    Logits,
    LossTerm,
    Norm,
    Parameter,
    Skipped,
    Step,
    WholeGradients,
    key,
    micro_of,
)
from isograd_verify.record.sketch import digest, dtype_name, sketch, squares
from isograd_verify.watch import foreign
from isograd_verify.watch.collectives import WatchMode, call_site
from isograd_verify.watch.fused import Fused
from isograd_verify.watch.hooks import Hooks
from isograd_verify.watch.labels import Labels
from isograd_verify.watch.life import Life
from isograd_verify.watch.rewritten import Rewrites
from isograd_verify.watch.routing import Routing
from isograd_verify.watch.sketching import Sketching, gradient_of, number_of
from isograd_verify.watch.steps import Steps

LIMIT = 1 << 28  # bytes of full gradients, parameters and activations that a rank writes per step
KINDS = {
    "final": "gradients", "whole": "gradients", "parameter": "parameters", "after": "parameters", "choice": "choices",
}  # fmt: skip
MOST_ELEMENTS = 1 << 12  # of a buffer that is looked at: a number for each expert
MOST_MICROS = 512  # backwards without an optimizer step, after which nothing more is expected


class Capture(Life):
    """`steps`: which are watched (steps.py). `parameters`: write these and gradients as a whole, too: only `verify
    compare` needs more than sketches. `lenient`: an error of the capture's own ends the watching, and is told, instead
    of ending the program. `replay`: a recording whose choices of experts are taken (routing.py). `beyond`: tensors of
    more elements are kept by sketches alone (sketching.py)."""

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
        super().__init__(Path(directory), lenient)
        self.steps = Steps.of(steps)
        self.activations, self.limit, self.parameters = activations, limit, parameters
        self.whole = parameters  # gradients are kept as a whole; feed.py keeps them where it keeps no parameters
        self.base = os.getcwd()
        self.numbers = self.arrivals = self.calls = 0
        self.groups: list[tuple[int, ...]] = []  # of the collectives so far
        self.names: dict[int, str] = {}  # id of a parameter -> its name
        self.inside: dict[int, list[str]] = {}  # id of a flat parameter (FSDP1) -> the names of what is in it
        self.flats: list[tuple[str, weakref.ref[foreign.FullyShardedDataParallel]]] = []
        self.roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self.modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.owned: set[str] = set()  # by the optimizers that stepped in this step
        self.rates: dict[str, float | None] = {}  # learning rates in this step
        self.nameless: dict[int, int] = {}  # id -> elements of an optimizer's parameters that no called module has
        self.waiting: set[str] = set()  # parameters of an optimizer that did not
        self.held: list[nn.Module | None] = []  # models that may never be stepped: kept until they are
        self.before: dict[str, dict[str, Any]] = {}  # each parameter before the step: its hash, and is it constant
        self.gradients: dict[str, dict[str, Any]] = {}  # of each, before clip: its hash, dtype and squares
        self.boxes: dict[str, tuple[foreign.Box, tuple[int, ...]]] = {}  # (box, whole shape), told by an engine
        self.part_shapes: dict[str, tuple[int, ...]] = {}
        self.part_boxes: dict[str, foreign.Box | None] = {}
        self.storages: dict[int, set[str]] = {}  # memory of a gradient -> names
        self.tensors: dict[str, Tensor] = {}
        self.written = 0
        self.reserved = 0  # bytes of this step's gradients and parameters, which go before activations
        self.left_out: Counter[str] = Counter()  # tensors beyond the limit, by their kind
        self.stack: list[str] = []  # modules under way, outermost first
        self.drawn: list[bool] = []
        self.buffers: dict[str, str] = {}  # the hash of each small buffer when it was last looked at
        self.unreached: dict[int, tuple[int, dict[str, GivenTensor]]] = {}  # given to calls, reached by no backward
        self.backing = 0  # calls of autograd.backward under way
        self.behind = ""  # the module whose backward is under way
        self.snapped = False
        self.cleared = 0  # the first micro-batch since the program threw gradients away without a step
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # as they were made
        self.belongs = WeakTensorKeyDictionary()  # parameters that some optimizer was given
        self.beside = False  # another run is to be compared with this one, call by call (calls.py, feed.py)
        self.unsettled = False  # an optimizer has stepped, and another one may before the next forward
        self.labels, self.fused = Labels(self), Fused(self)
        self.routing = Routing(self, replay)
        self.sketching = Sketching(self, beyond)
        self.rewrites = Rewrites(self)
        self.watch = WatchMode(self)
        self.hooks = Hooks(self)

    # -- what collectives.Watch tells ----------------------------------------------------------------------------

    def phase(self) -> str:
        """Where the program is: in a backward, an optimizer's step, a model's forward, or elsewhere."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "step" if self.stepping else "forward" if self.stack else "other"

    def collective(self, op: str, ranks: tuple[int, ...], tensors: list[Tensor], reduce: str) -> int:
        """Notes a collective, and returns its number."""
        self.numbers += 1
        self.groups.append(ranks)
        phase = self.phase()
        local = [foreign.local(t) for t in tensors]
        covers: set[str] = set()
        if op in ("all_reduce", "reduce_scatter", "reduce"):
            for t in local:
                covers |= self.storages.get(t.untyped_storage().data_ptr(), set())
        between = self.snapped and phase == "other" and not self.hooks.inside_engine
        if between and self._sums_gradients(op, covers, local):
            self.snapped = False  # the clip came before the sum: gradients are what the sum leaves
        self.rewrites.communicated()
        module = self.behind if phase == "backward" else self.stack[-1] if self.stack else ""
        call = Collective(
            *self.now,
            n=self.numbers,
            op=op,
            group=ranks,
            dtype=dtype_name(local[0]) if local else "",
            numel=sum(t.numel() for t in local),
            bytes=sum(t.numel() * t.element_size() for t in local),
            start=time.time() - self.began,
            phase=phase,
            module=module,
            site=call_site(self.base),
            covers=tuple(sorted(covers)),
            passed=self.backwards,
            reduce=reduce,
        )
        self.event(call)
        return self.numbers

    def _sums_gradients(self, op: str, covers: set[str], given: list[Tensor]) -> bool:
        """Whether a collective reduces gradients, where they are or all of them in one buffer."""
        if op not in ("all_reduce", "reduce_scatter", "reduce"):
            return False
        size = sum(foreign.local(p.grad).numel() for p in self.learn_names().values() if p.grad is not None)
        return bool(covers) or 1 < size <= sum(t.numel() for t in given)

    def ended(self, number: int, seconds: float) -> None:
        """Notes how long a collective took."""
        if self.writer is not None:
            self.writer.event(End(*self.now, n=number, seconds=seconds))

    def term(self, site: str, value: float, weights: tuple[float, ...], joined: int) -> None:
        """Notes a term of the loss, when backward has come to it."""
        self.event(LossTerm(*self.now, site=site, value=value, weights=weights, joined=joined))

    def choice(self, scores: Tensor, indices: Tensor, site: str) -> Tensor | None:
        """Notes which few of each row were chosen; returns the indices to take instead, if others are replayed."""
        return self.routing.chosen(scores, indices, site)

    def look_at_buffers(self, during: str) -> None:
        """Notes which small buffers have changed since the last look."""
        now: dict[str, str] = {}
        for prefix, reference in self.roots:
            root = reference()
            for name, buffer in root.named_buffers() if root is not None else ():
                if buffer.numel() <= MOST_ELEMENTS and not foreign.imagined(buffer):
                    now[prefix + foreign.plain_name(name)] = digest(foreign.local(buffer))
        changed = tuple(name for name, hashed in now.items() if self.buffers.get(name, hashed) != hashed)
        self.buffers = now
        if changed and self.micro >= 0:  # else between two steps, where buffers are changed as parameters are
            self.event(Changed(*self.now, during=during, names=changed))

    def logit_shift(self, shift: float, size: float) -> None:
        """Notes a rank's part of a sum that must be zero."""
        self.event(Logits(*self.now, shift=shift, size=size))

    def drew(self) -> None:
        """The module under way has drawn random numbers."""
        if self.drawn:
            self.drawn[-1] = True

    # -- what hooks.Hooks tells ----------------------------------------------------------------------------------

    def root(self, module: nn.Module) -> None:
        """A module was called from outside any other, or is no part of the one that calls it: learn its parameters'
        names."""
        if module in self.modules or not any(True for _ in module.parameters()):
            return
        inner = module
        while foreign.shell(inner):
            inner = next(iter(inner.children()))
        prefix = f"{type(inner).__name__}." if self.roots else ""
        if prefix and prefix in {taken for taken, _ in self.roots}:
            prefix = f"{type(inner).__name__}{len(self.roots)}."
        self.roots.append((prefix, weakref.ref(inner)))
        for name, value in foreign.coefficients(inner).items():
            self.event(Coefficient(*self.now, name=name, value=value))
        for name, child in inner.named_modules():
            self.modules.setdefault(child, (prefix + foreign.plain_name(name)).rstrip("."))
        for name, child in foreign.flat_modules(module):
            self.flats.append((prefix + (f"{name}." if name else ""), weakref.ref(child)))
        self.modules.setdefault(module, prefix.rstrip("."))
        self.learn_names()

    def learn_names(self) -> dict[str, foreign.Held]:
        """Every parameter by name, once; parameters change identity when FSDP shards them, so this is asked again."""
        found: dict[str, foreign.Held] = {}
        taken: set[int] = set()
        for prefix, flat in self.flats:
            wrapper = flat()
            for name, piece in foreign.pieces(wrapper).items() if wrapper is not None else ():
                found[prefix + name] = piece
                if prefix + name not in self.inside.setdefault(id(piece.owner), []):
                    self.inside[id(piece.owner)].append(prefix + name)
        for prefix, reference in self.roots:
            root = reference()
            for name, parameter in root.named_parameters() if root is not None else ():
                in_pieces = foreign.flat(parameter) or prefix + foreign.plain_name(name) in found
                if id(parameter) not in taken and not in_pieces:
                    taken.add(id(parameter))
                    known = self.names.setdefault(id(parameter), prefix + foreign.plain_name(name))
                    found[known] = parameter
        return found

    def contribution(self, name: str, gradient: Tensor, box: foreign.Box | None = None) -> None:
        """What this backward adds to a parameter on this rank, before communication. `box`: of a DTensor's part."""
        local = foreign.local(gradient)
        micro = self.micro + (1 if self.fused.inside else 0)  # in a Function's forward: before its backward
        # Checkpointed modules arrive once per use: later arrivals in one backward are contributions of their own.
        use = next(i for i in count() if f"part/{key(micro, i)}/{name}" not in self.tensors)
        self.tensors[f"part/{key(micro, use)}/{name}"] = sketch(local)
        self.sketching.contribution(key(micro, use), name, local)
        same = box is not None and tuple(b - a for a, b in box) == tuple(local.shape)  # else it is a part of a sum
        self.part_shapes[name], self.part_boxes[name] = tuple(local.shape), box if same else None

    def accumulated(self, name: str, parameter: Tensor) -> None:
        """Notes where in memory a parameter's gradient lies, so that a collective on it is recognised."""
        if parameter.grad is not None:
            storage = foreign.local(parameter.grad).untyped_storage().data_ptr()
            self.storages.setdefault(storage, set()).add(name)

    def keep_activation(self, kind: str, label: str, value: Tensor) -> None:
        """Numbered in the order of their coming, which a file of tensors does not keep."""
        self.arrivals += 1
        micro, _, module = label.partition("/")
        self.keep(f"{kind}/{micro}/{self.arrivals:06d}/{module}", value)

    def keep(self, key: str, value: Tensor, of: foreign.Held | None = None) -> bool:
        """Hold a full tensor for the step's file, within the limit; or its sketches, if it is `of` a parameter."""
        if of is not None and self.sketching.instead(key, value, of):
            return True
        kind = KINDS.get(key.partition("/")[0], "activations")
        size = value.numel() * value.element_size()
        if self.written + size > self.limit - (self.reserved if kind in ("activations", "choices") else 0):
            self.left_out[kind] += 1
            return False
        self.written += size
        self.tensors[key] = value.detach().clone()
        return True

    def reserve(self) -> None:
        """Before the first activation of a call: gradients come last and are what everything else is compared for."""
        self.reserved = 0
        for parameter in self.learn_names().values():
            copies = int(parameter.requires_grad and self.whole) + 2 * int(self.parameters)
            part = foreign.local(parameter)
            self.reserved += copies * part.numel() * part.element_size()
        self.sketching.reserve(self.reserved)

    def backward_begins(self, roots: list[Tensor]) -> None:
        """A call of autograd.backward begins: one more micro-batch."""
        self.close_step()
        if not self.active:
            return
        if self.micro >= 0 and self._thrown_away():
            self.cleared = self.micro + 1
            if self.snapped:  # the norm was looked at, and the step left out: as after an overflow
                self.drop_before(self.cleared)
                self.event(Skipped(*self.now))
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
        self.event(Backward(*self.now, site=call_site(self.base), loss=self.watch.reduced, summed=summed))
        self.watch.reduced = ""

    def _thrown_away(self) -> bool:
        """Whether no parameter still has what earlier backwards of this step added to it."""
        added = [p for n, p in self.learn_names().items() if n in self.part_shapes]
        return bool(added) and not any(map(foreign.holds_gradient, added))

    def drop_before(self, micro: int) -> None:
        """Forgets what backwards before this micro-batch added: their gradients were thrown away."""
        for path in [k for k in self.tensors if (n := number_of(k)) is not None and micro_of(n) < micro]:
            del self.tensors[path]

    def snapshot(self, gradients: dict[str, Tensor] | None = None, talk: bool = True) -> None:
        """The gradients as they are before clip: taken where clipping is called, else at the optimizer's door.

        `gradients`: whole ones that an engine gives by name; else every parameter's own `grad`. `talk`: the other
        ranks are here too, so a DTensor may be brought into place.
        """
        if self.snapped:
            return
        self.snapped = True
        if any(getattr(p, "main_grad", None) is not None for p in self.learn_names().values()):
            raise RuntimeError(
                "gradients are kept in main_grad, as by Megatron-Core's DistributedDataParallel and distributed "
                "optimizer, which is not understood"
            )
        self.before = {n: _state(foreign.local(p)) for n, p in self.learn_names().items()}
        for name, parameter in self.learn_names().items():
            gradient = gradients.get(name) if gradients is not None else parameter.grad
            if gradient is None or (not talk and foreign.misplaced(parameter, gradient)):
                continue
            self.gradient(name, parameter, gradient)
        self.guarded(self.rewrites.write_early, "changes")()
        if gradients is not None:
            self.event(WholeGradients(*self.now, names=tuple(sorted(gradients))))

    def gradient(self, name: str, parameter: foreign.Held, gradient: Tensor) -> None:
        """Keeps a gradient as it is now."""
        self.active, was = False, self.active  # bringing a DTensor into its parameter's place may communicate
        part = foreign.placed_like(parameter, gradient)
        self.active = was
        self.tensors[f"sum/{name}"] = sketch(part, self.offset(name, parameter, part))
        self.gradients[name] = {
            "gradient_hash": digest(part), "gradient_dtype": dtype_name(part), "squares": squares(part),
        }  # fmt: skip
        if self.whole:
            self.keep(f"final/{name}", part, parameter)

    def offset(self, name: str, parameter: foreign.Held, part: Tensor) -> int:
        """Where a shard starts in the flat tensor to which this rank contributed as a whole (FSDP), else 0."""
        return foreign.offset(parameter, part, self.part_shapes.get(name), self.part_boxes.get(name))

    def norm(self, value: float, site: str) -> None:
        """Notes a gradient norm that the program has computed."""
        self.event(Norm(*self.now, value=value, site=site))

    def before_step(self, owned: list[Tensor], rates: list[float | None]) -> None:
        """An optimizer is about to step these parameters, each with a learning rate. Several that step without a
        backward in between belong to one step."""
        self.held.clear()
        self.learn_names()
        self.owned |= {name for p in owned for name in self._names_of(p)}
        self.unnamed(owned)
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
        name = self.names.get(id(parameter))
        return self.inside.get(id(parameter), [name] if name else [])

    def unnamed(self, owned: list[Tensor]) -> None:
        """Parameters that no module call has named (a loss's temperature, say) get a name by their place."""
        for i, parameter in enumerate(owned):
            if not self._names_of(parameter) and not foreign.joined():
                self.names[id(parameter)] = f"parameter_{i}"
            elif not self._names_of(parameter) and parameter.grad is not None:
                self.nameless[id(parameter)] = parameter.numel()

    def entrusted(self, optimizer: Any, parameters: list[Tensor]) -> None:
        """An optimizer was made, or got more parameters."""
        self.optimizers.add(optimizer)
        for parameter in parameters:
            self.belongs[parameter] = True

    def after_step(self) -> None:
        """An optimizer has stepped; with a single one, the step is over."""
        if self.last_step_at != self.backwards or self.last_step_at < 0:
            self.last_step_at = self.backwards
            self.unsettled = True
        if len(self.optimizers) < 2:
            self.close_step()

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
                declared=foreign.declares(parameter),
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
        now = time.time() - self.began
        was = Step(
            *self.now, parameters=about, backwards=self.backwards, note=note, at=now, left_out=left,
            by_hand=bool(not note and not self.optimizers and self.rewrites.by_hand), nameless=len(self.nameless),
        )  # fmt: skip
        self.event(replace(was, issued=foreign.issued()))
        self.out.tensors(self.step, self.tensors)
        self.tensors, self.written = {}, 0
        self.left_out.clear()
        self.storages.clear()
        self.owned.clear()
        self.nameless.clear()
        self.rates.clear()
        self.waiting.clear()
        self.watch.flows.clear()
        self.step, self.micro, self.snapped, self.cleared = self.step + 1, -1, False, 0
        if not self.steps.watches(self.step):
            self.pause()


def _state(part: Tensor) -> dict[str, Any]:
    flat = part.detach().reshape(-1)
    constant = flat.numel() == 0 or bool((flat[:64] == flat[0]).all() and (flat == flat[0]).all())
    return {"before": digest(part), "constant": constant}
