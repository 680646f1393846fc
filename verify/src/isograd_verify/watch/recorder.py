"""What a capture has gathered: its state, and what is told to it by hooks and by the dispatch mode, which know this
class and not the capture. What a step begins and ends with is in capture.py.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from isograd_verify.record import events, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.flows import memory
from isograd_verify.watch.life import Life

MOST_CUT = 16  # ranks over which a tensor is cut whose shards are too small to be recorded by sketches


class Sketching:
    """`beyond`: elements of a tensor that is recorded by sketches alone; None: only where whole ones do not fit."""

    def __init__(self, boxes: dict[str, tuple[foreign.Box, tuple[int, ...]]], beyond: int | None) -> None:
        self.boxes = boxes
        self.on = self.asked = beyond is not None
        self.small = sketch.SMALL if beyond is None else beyond

    def instead(self, path: str, value: Tensor, of: foreign.Held) -> dict[str, Tensor]:
        """The sketches to keep instead of a whole tensor, by path; none: the tensor is kept as a whole."""
        kind, _, name = path.partition("/")
        box, whole = self.boxes.get(name) or (foreign.box_of(of), foreign.whole_shape(of))
        in_a_row = box is not None and len(box) == 1 != len(whole)
        shape = whole if in_a_row else tuple(value.shape)
        if not self.on or not value.is_floating_point() or not sketch.worthwhile(shape, value.numel(), self.small):
            return {}
        if in_a_row and box is not None:
            sums = sketch.project_row(value, whole, box[0][0])
        else:
            own = box is not None and tuple(b - a for a, b in box) == shape
            sums = sketch.project(value, tuple(a for a, _ in box) if box is not None and own else ())
        return _paths(kind, name, sums, torch.float64 if value.dtype == torch.float64 else torch.float32)

    def contribution(self, number: int, name: str, value: Tensor) -> dict[str, Tensor]:
        """What a backward added on this rank: a shard's is explained by these where its place is not known yet."""
        least = self.small // MOST_CUT  # of a large tensor's shard
        if not self.on or not sketch.worthwhile(tuple(value.shape), value.numel(), least):
            return {}
        sums = sketch.project(value)
        small = {d: torch.stack([sketch.sketch(row) for row in along]) for d, along in sums.along.items()}
        return _paths(str(number), name, sketch.Projected(sums.shape, small), torch.float64)


def _paths(kind: str, name: str, sums: sketch.Projected, dtype: torch.dtype) -> dict[str, Tensor]:
    return {f"along/{kind}/{dim}/{name}": along.to(dtype) for dim, along in sums.along.items()}


# Words of a path before a parameter's name.
_DEPTH = {**dict.fromkeys(("sum", "final", "clipped", "early", "whole"), 1), "part": 2, "along": 3}


def gradient_of(path: str) -> str | None:
    """The parameter whose gradient, or a part of it, a tensor of a step's file tells; None of any other tensor."""
    words = path.split("/", _DEPTH.get(path.partition("/")[0], 0))
    state = words[0] == "along" and words[1] in ("parameter", "after")
    return words[-1] if len(words) > 1 and not state else None


def number_of(path: str) -> int | None:
    """The number of the contribution that a tensor of a step's file tells; None of any other tensor."""
    kind, *rest = path.split("/", 2)
    return int(rest[0]) if kind in ("part", "along") and rest[0].isdigit() else None


KINDS = {
    "final": "gradients", "whole": "gradients", "parameter": "parameters", "after": "parameters", "choice": "choices",
}  # fmt: skip
MOST_ELEMENTS = 1 << 12  # of a buffer that is looked at: a number for each expert


class Recorder(Life):
    """Its fields are those of the step now under way, unless a comment says how long they last."""

    def __init__(self, directory: Path, lenient: bool, limit: int, parameters: bool, beyond: int | None) -> None:
        super().__init__(directory, lenient)
        self.limit, self.parameters = limit, parameters
        self.whole = parameters  # gradients are kept as a whole; feed.py keeps them where it keeps no parameters
        self.activations = False
        self.base = os.getcwd()
        self.numbers = self.arrivals = self.calls = 0
        self.groups: list[tuple[int, ...]] = []  # of the collectives so far
        self.names = WeakTensorKeyDictionary()  # a parameter -> its name; the id of one that is gone is soon another's
        self.inside = WeakTensorKeyDictionary()  # -> the names of what is in a flat parameter (FSDP1)
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
        self.storages: dict[int, tuple[StorageWeakRef, set[str]]] = {}  # memory of a gradient -> names
        self.tensors: dict[str, Tensor] = {}
        self.written = 0
        self.reserved = 0  # bytes of this step's gradients and parameters, which go before activations
        self.left_out: Counter[str] = Counter()  # tensors beyond the limit, by their kind
        self.stack: list[str] = []  # modules under way, outermost first
        self.drawn: list[bool] = []
        self.buffers: dict[str, str] = {}  # the hash of each small buffer when it was last looked at
        # Given to calls, reached by no backward.
        self.unreached: dict[int, tuple[int, dict[str, events.GivenTensor]]] = {}
        self.backing = 0  # calls of autograd.backward under way
        self.behind = ""  # the module whose backward is under way
        self.snapped = False
        self.cleared = 0  # the first micro-batch since the program threw gradients away without a step
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # as they were made
        self.belongs = WeakTensorKeyDictionary()  # parameters that some optimizer was given
        self.posted = False  # something was sent or received outside of a model's forward and backward
        self.beside = False  # another run is to be compared with this one, call by call (calls.py, feed.py)
        self.unsettled = False  # an optimizer has stepped, and another one may before the next forward
        self.inside_engine = 0  # steps of engines under way
        self.in_function = 0  # forwards of autograd Functions under way
        self.inner_weights: list[events.LabelWeight | events.MeanWeight] = []  # in the Function that was called last
        self.reduced = ""  # where many numbers with a graph last became one: the loss, most likely
        self.sketching = Sketching(self.boxes, beyond)

    def backward_begins(self, roots: list[Tensor], scaled: int = 0) -> None:
        """A call of autograd.backward begins."""

    def snapshot(self, gradients: dict[str, Tensor] | None = None, talk: bool = True) -> None:
        """Gradients are about to be clipped, or stepped."""

    def before_step(self, owned: list[Tensor], rates: list[float | None]) -> None:
        """An optimizer is about to step these parameters."""

    def after_step(self) -> None:
        """An optimizer has stepped."""

    def phase(self) -> str:
        """Where the program is: in a backward, an optimizer's step, a model's forward, or elsewhere."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "step" if self.stepping else "forward" if self.stack else "other"

    def collective(self, op: str, ranks: tuple[int, ...], tensors: list[Tensor], peer: int = -1) -> events.Collective:
        """Notes a collective."""
        self.numbers += 1
        self.groups.append(ranks)
        phase = self.phase()
        self.posted |= op in ("send", "recv") and phase == "other"
        local = [foreign.local(t) for t in tensors]
        held = [self.storages.get(memory(t), (None, set[str]()))[1] for t in local if op in events.REDUCING]
        covers = set[str]().union(*held)
        if self.snapped and phase == "other" and not self.inside_engine and op in events.REDUCING:
            size = sum(foreign.local(p.grad).numel() for p in self.learn_names().values() if p.grad is not None)
            if covers or 1 < size <= sum(t.numel() for t in local):  # gradients where they are, or all in one buffer
                self.snapped = False  # the clip came before the sum: gradients are what the sum leaves
        module = self.behind if phase == "backward" else self.stack[-1] if self.stack else ""
        dtype = sketch.dtype_name(local[0]) if local else ""
        call = events.Collective(
            *self.now, n=self.numbers, op=op, group=ranks, peer=peer, dtype=dtype,
            numel=sum(t.numel() for t in local), bytes=sum(t.numel() * t.element_size() for t in local),
            start=time.time() - self.began, phase=phase, module=module, site=foreign.call_site(self.base),
            covers=tuple(sorted(covers)), passed=self.backwards, inside=self.in_function > 0,
            narrow=op in events.REDUCING and all(map(sketch.in_bf16, local)),
        )  # fmt: skip
        self.event(call)
        return call

    def weight(self, told: events.LabelWeight | events.MeanWeight) -> None:
        """Notes the weight of labels or numbers; inside a Function's forward it is kept for that (fused.py)."""
        self.inner_weights.append(told) if self.in_function else self.event(told)

    def look_at_buffers(self, during: str) -> None:
        """Notes which small buffers have changed since the last look."""
        now: dict[str, str] = {}
        for prefix, reference in self.roots:
            root = reference()
            for name, buffer in root.named_buffers() if root is not None else ():
                if buffer.numel() <= MOST_ELEMENTS and not foreign.imagined(buffer):
                    now[prefix + foreign.plain_name(name)] = sketch.digest(foreign.local(buffer))
        changed = tuple(name for name, hashed in now.items() if self.buffers.get(name, hashed) != hashed)
        self.buffers = now
        if changed and self.micro >= 0:  # else between two steps, where buffers are changed as parameters are
            self.event(events.Changed(*self.now, during=during, names=changed))

    def root(self, module: nn.Module) -> None:
        """A module was called that is no part of a known one: learn its parameters' names."""
        if module in self.modules or not any(True for _ in module.parameters()):
            return
        inner = foreign.unwrapped(module)
        prefix = f"{type(inner).__name__}." if self.roots else ""
        if prefix and prefix in {taken for taken, _ in self.roots}:
            prefix = f"{type(inner).__name__}{len(self.roots)}."
        self.roots.append((prefix, weakref.ref(inner)))
        for name, value in foreign.coefficients(inner).items():
            self.event(events.Coefficient(*self.now, name=name, value=value))
        for name, child in inner.named_modules():
            self.modules.setdefault(child, (prefix + foreign.plain_name(name)).rstrip("."))
        for name, child in module.named_modules():  # FSDP1's, with parameters of their own
            if isinstance(child, foreign.FullyShardedDataParallel) and child._handle is not None:
                plain = foreign.plain_name(name)
                self.flats.append((prefix + (f"{plain}." if plain else ""), weakref.ref(child)))
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
                if prefix + name not in (known := self.inside.setdefault(piece.owner, [])):
                    known.append(prefix + name)
        for prefix, reference in self.roots:
            root = reference()
            for name, parameter in root.named_parameters() if root is not None else ():
                in_pieces = foreign.flat(parameter) or prefix + foreign.plain_name(name) in found
                if id(parameter) not in taken and not in_pieces:
                    taken.add(id(parameter))
                    known = self.names.setdefault(parameter, prefix + foreign.plain_name(name))
                    found[known] = parameter
        return found

    def contribution(self, name: str, gradient: Tensor | None, box: foreign.Box | None = None) -> None:
        """What this backward adds to a parameter on this rank, before communication. `box`: of a DTensor's part."""
        if gradient is None:
            return
        local = foreign.local(gradient)
        if not self.backing and self.last_step_at == self.backwards:  # torch.autograd.grad, and nothing else: a
            self.backwards += 1  # pipeline's schedule that cuts backward in two
        micro = max(self.micro + (1 if self.in_function else 0), 0)  # in a Function's forward: before its backward
        # Checkpointed modules arrive once per use: later arrivals in one backward are contributions of their own.
        use = next(i for i in count() if f"part/{events.key(micro, i)}/{name}" not in self.tensors)
        self.tensors[f"part/{events.key(micro, use)}/{name}"] = sketch.sketch(local)
        if self.whole:
            self.tensors |= self.sketching.contribution(events.key(micro, use), name, local)
        same = box is not None and tuple(b - a for a, b in box) == tuple(local.shape)  # else it is a part of a sum
        self.part_shapes[name], self.part_boxes[name] = tuple(local.shape), box if same else None

    def accumulated(self, name: str, parameter: Tensor) -> None:
        """Notes where in memory a parameter's gradient lies, so that a collective on it is recognised."""
        if parameter.grad is not None:
            part = foreign.local(parameter.grad)
            self.storages.setdefault(memory(part), (StorageWeakRef(part.untyped_storage()), set()))[1].add(name)

    def keep_activation(self, kind: str, label: str, value: Tensor) -> None:
        """Numbered in the order of their coming, which a file of tensors does not keep."""
        self.arrivals += 1
        micro, _, module = label.partition("/")
        self.keep(f"{kind}/{micro}/{self.arrivals:06d}/{module}", value)

    def keep(self, key: str, value: Tensor, of: foreign.Held | None = None) -> None:
        """Hold a full tensor for the step's file, within the limit; or its sketches, if it is `of` a parameter."""
        sketches = {} if of is None else self.sketching.instead(key, value, of)
        self.tensors |= sketches
        if sketches:
            return
        kind = KINDS.get(key.partition("/")[0], "activations")
        size = value.numel() * value.element_size()
        if self.written + size > self.limit - (self.reserved if kind in ("activations", "choices") else 0):
            self.left_out[kind] += 1
            return
        self.written += size
        self.tensors[key] = value.detach().clone()

    def reserve(self) -> None:
        """Before the first activation of a call: gradients come last and are what everything else is compared for."""
        self.reserved = 0
        for parameter in self.learn_names().values():
            copies = int(parameter.requires_grad and self.whole) + 2 * int(self.parameters)
            part = foreign.local(parameter)
            self.reserved += copies * part.numel() * part.element_size()
        self.sketching.on = self.sketching.asked or self.reserved > self.limit

    def gradient(self, name: str, parameter: foreign.Held, gradient: Tensor) -> None:
        """Keeps a gradient as it is now."""
        self.active, was = False, self.active  # bringing a DTensor into its parameter's place may communicate
        part = foreign.placed_like(parameter, gradient)
        self.active = was
        self.tensors[f"sum/{name}"] = sketch.sketch(part, self.offset(name, parameter, part))
        hashed, kind = sketch.digest(part), sketch.dtype_name(part)
        self.gradients[name] = {"gradient_hash": hashed, "gradient_dtype": kind, "squares": sketch.squares(part)}
        if self.whole:
            self.keep(f"final/{name}", part, parameter)

    def offset(self, name: str, parameter: foreign.Held, part: Tensor) -> int:
        """Where a shard starts in the flat tensor to which this rank contributed as a whole (FSDP), else 0."""
        return foreign.offset(parameter, part, self.part_shapes.get(name), self.part_boxes.get(name))

    def entrusted(self, optimizer: Any, parameters: list[Tensor]) -> None:
        """An optimizer was made, or got more parameters."""
        self.optimizers.add(optimizer)
        for parameter in parameters:
            self.belongs[parameter] = True
