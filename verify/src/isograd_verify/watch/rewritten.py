"""Sees a program change gradients itself between the last backward and the step: adaptive clipping, noise, a mask.

Before the first operator that writes into the memory of a gradient, the gradient is kept (`early/NAME` its sketch,
`whole/NAME` all of it); judge/analysis.py decides which of the two is judged. After a collective only gradients that it
has reduced are kept, where they lie or in a buffer: what is written into others may be its result. Scaling by one
number is told as a factor, but for the last one of all gradients, by less than one and by no 1 / n: it may be a clip.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.record.events import Rewritten
from isograd_verify.record.sketch import sketch, squares
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder

COPYING = ("copy_", "_foreach_copy_")
SCALING = ("mul_", "div_", "_foreach_mul_", "_foreach_div_", "zero_", "_foreach_zero_")


@dataclass(frozen=True)
class Before:
    """A gradient as it was before the program wrote into it."""

    sketch: Tensor
    squares: float
    whole: Tensor | None
    scaled: bool  # all that has been done to it since is a scaling, once


class Rewrites:
    """Told of operators that write, and of collectives, in the order in which they run."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.by_hand, self.weights = False, (-1, dict[int, str]())  # stepped so; backwards, parameters not yet written
        self.begin()

    def begin(self) -> None:
        """A backward begins: what was kept is no gradient of the step."""
        self.kept: dict[str, Before] = {}
        self.site = ""
        self.memory: dict[int, list[tuple[str, foreign.Held, Tensor]]] | None = None
        self.reduced: set[str] | None = None
        self.buffers: set[int] = set()  # the memory of what was reduced

    def communicated(self, covers: Collection[str], reduced: list[Tensor], numel: int) -> None:
        """A collective ran outside of backward: these gradients are reduced where they lie, or these tensors."""
        if self._between() and (covers or numel > 1):
            before = self.reduced or set()
            self.kept = {name: one for name, one in self.kept.items() if name in before - set(covers)}
            self.site = self.site if self.kept else ""
            self.reduced = before | set(covers)
        if self._between():
            self.buffers |= {_address(foreign.local(t)) for t in reduced} - {0}

    def look(self, func: Any, args: tuple[Any, ...]) -> None:
        """An operator is about to run."""
        if not self.capture.optimizers and (places := _written(func)):
            self._by_hand([args[place] for place in places if place < len(args)])
        unreduced = self.reduced == set() and not self.buffers
        if unreduced or not self._between() or not (places := _written(func)):
            return
        copies = func._schema.name.partition("::")[2] in COPYING and len(args) > 1
        for written in [_listed(args[place]) for place in places if place < len(args)]:
            sources = _listed(args[1]) if copies else [None] * len(written)
            for tensor, source in zip(written, sources, strict=False):
                if isinstance(tensor, Tensor) and not foreign.imagined(tensor):
                    self._writes(tensor, source, _scales(func, args))

    def _writes(self, tensor: Tensor, source: Any, scales: bool) -> None:
        at = _address(tensor)
        if self.memory is None or (at in self.buffers and at not in self.memory):
            self.memory = {}
            for name, parameter in self.capture.learn_names().items():
                if parameter.grad is not None and not foreign.misplaced(parameter, parameter.grad):
                    part = foreign.local(parameter.grad)
                    if address := _address(part):
                        self.memory.setdefault(address, []).append((name, parameter, part))
        first, last = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()  # each without gaps
        held = [(one, one[2].storage_offset(), one[2].numel()) for one in self.memory.get(at, [])]
        found = [one for one, start, size in held if start < last and first < start + size]
        filled = isinstance(source, Tensor) and _address(source) in self.buffers
        if self.reduced is not None and (filled or at in self.buffers):
            self.reduced |= {name for name, *_ in found}
        c = self.capture
        for name, parameter, part in () if filled else found:
            later = name in self.kept and not self.kept[name].scaled
            if not later and (self.reduced is None or name in self.reduced):
                whole = part.detach().clone() if c.whole else None
                self.kept[name] = Before(sketch(part, c.offset(name, parameter, part)), squares(part), whole, scales)
                self.site = self.site or foreign.call_site(c.base)

    def _by_hand(self, written: list[Any]) -> None:
        """A program without an optimizer writes into parameters that have a gradient, for the first time since the last
        backward: that is its step. It may reduce and step one after another, so each gradient is that of its turn."""
        c = self.capture
        busy = c.stack or c.backing or c.stepping or c.micro < 0 or c.inside_engine or c.flats
        busy = busy or foreign.imagined(written) or torch._C._current_graph_task_id() != -1
        if busy or (c.last_step_at == c.backwards and not c.unsettled):
            return
        if self.weights[0] != c.backwards:
            held = [(n, p) for n, p in c.learn_names().items() if isinstance(p, Tensor) and p.grad is not None]
            self.weights = c.backwards, {at: n for n, p in held if (at := _address(foreign.local(p)))}
        flat = [t for one in written for t in _listed(one)]
        names = {self.weights[1].pop(_address(t), "") for t in flat if isinstance(t, Tensor)} - {""}
        if names and not c.unsettled:
            learn = [p for p in c.learn_names().values() if isinstance(p, Tensor) and p.requires_grad]
            c.before_step(learn, [None] * len(learn))
            c.last_step_at, c.unsettled, self.by_hand = c.backwards, True, True
        for name, parameter in c.learn_names().items():
            if name in names and isinstance(parameter, Tensor) and parameter.grad is not None:
                if (old := c.tensors.pop(f"final/{name}", None)) is not None:
                    c.written -= old.numel() * old.element_size()
                c.gradient(name, parameter, parameter.grad)
                c.tensors[f"clipped/{name}"] = c.tensors[f"sum/{name}"].clone()

    def write_early(self) -> None:
        """The step's gradients have been looked at: writes what they were before."""
        c, factor = self.capture, 0.0
        kept = {name: one for name, one in self.kept.items() if f"sum/{name}" in c.tensors}
        if all(one.scaled for one in kept.values()):
            factor = self._factor(kept)
        kept = {name: one for name, one in kept.items() if factor or not one.scaled}
        for name, one in kept.items():
            c.tensors[f"early/{name}"] = one.sketch
            if one.whole is not None:
                c.keep(f"whole/{name}", one.whole)
        if kept:
            c.event(Rewritten(*c.now, site=self.site, factor=factor))
        self.begin()

    def _factor(self, kept: dict[str, Before]) -> float:
        """By what all gradients that are stepped here were scaled last; 0: they were not, or as no clip does it."""
        c = self.capture
        now = {name: float(about["squares"]) for name, about in c.gradients.items()}
        mine = c.owned | kept.keys() if c.owned else now.keys()
        held = [name for name in now if name in mine and f"sum/{name}" in c.tensors and now[name]]
        if not held or not all(name in kept and kept[name].squares for name in held):
            return 0.0
        factors = [(now[name] / kept[name].squares) ** 0.5 for name in held]
        low, high = min(factors), max(factors)
        if not all(map(math.isfinite, factors)):  # an overflow, before a scaler that skips the step
            return 0.0
        whole = abs(1 / high - round(1 / high)) <= tolerances.WHOLE / high
        return 0.0 if high - low > tolerances.FACTOR * high or high > 1 - tolerances.FACTOR or whole else high

    def _between(self) -> bool:
        """Whether the program is between a backward and the step, and not in a model's forward."""
        c = self.capture
        busy = c.stack or c.backing or c.snapped or c.stepping or c.micro < 0
        return not busy and torch._C._current_graph_task_id() == -1


def _address(tensor: Tensor) -> int:
    """Of a tensor's memory; 0: it has none, as without elements or in an engine's `.grad` until the step."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except RuntimeError:
        return 0


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


@lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[int, ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _scales(func: Any, args: tuple[Any, ...]) -> bool:
    name = func._schema.name.partition("::")[2]
    by = args[1] if len(args) > 1 else None
    number = not isinstance(by, (list, tuple)) and (not isinstance(by, Tensor) or by.dim() == 0)
    return name.startswith("_amp_") or (name in SCALING and number)
