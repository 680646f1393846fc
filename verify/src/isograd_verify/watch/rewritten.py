"""Sees a program change gradients itself between the last backward and the step: adaptive clipping, noise, a mask.

What is judged is what reached the optimizer. If that is no sum of what backwards added, it may still have been one
before the program's own change. So before the first operator that writes into the memory of a gradient, the gradient is
kept (`early/NAME` its sketch, `whole/NAME` all of it); judge/analysis.py decides which of the two is judged. Scaling by
one number is left alone: a factor is told as a factor. After a collective only gradients that it has reduced where they
lie are kept, for what is written into others may be its result.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isograd_verify.record.events import Rewritten
from isograd_verify.record.sketch import sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder
from isograd_verify.watch.sites import call_site

SCALING = ("mul_", "div_", "_foreach_mul_", "_foreach_div_", "zero_", "_foreach_zero_")


class Rewrites:
    """Told of operators that write, and of collectives, in the order in which they run."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.by_hand, self.weights = False, (-1, dict[int, str]())  # stepped so; backwards, parameters not yet written
        self.begin()

    def begin(self) -> None:
        """A backward begins: what was kept is no gradient of the step."""
        self.kept: dict[str, tuple[foreign.Held, Tensor]] = {}
        self.site = ""
        self.memory: dict[int, list[tuple[str, foreign.Held, Tensor]]] | None = None
        self.reduced: set[str] | None = None

    def communicated(self, covers: Collection[str]) -> None:
        """A collective ran outside of backward, and reduced these gradients where they lie."""
        if self._between():
            reduced, kept, site = self.reduced or set(), self.kept, self.site
            self.begin()
            self.reduced = reduced | set(covers)
            self.kept = {name: one for name, one in kept.items() if name in reduced - set(covers)}
            self.site = site if self.kept else ""

    def look(self, func: Any, args: tuple[Any, ...]) -> None:
        """An operator is about to run."""
        if not self.capture.optimizers and (places := _written(func)):
            self._by_hand([args[place] for place in places if place < len(args)])
        if self.reduced == set() or not self._between() or not (places := _written(func)) or _scales(func, args):
            return
        if self.memory is None:
            self.memory = {}
            for name, parameter in self.capture.learn_names().items():
                if parameter.grad is not None and not foreign.misplaced(parameter, parameter.grad):
                    part = foreign.local(parameter.grad)
                    if address := _address(part):
                        self.memory.setdefault(address, []).append((name, parameter, part))
        for place in places:
            written = args[place] if place < len(args) else None
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                if isinstance(tensor, Tensor):
                    self._keep(self.memory.get(_address(tensor), []))

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
        flat = [t for one in written for t in (one if isinstance(one, (list, tuple)) else [one])]
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
        c = self.capture
        for name, (parameter, part) in self.kept.items():
            if f"sum/{name}" in c.tensors:
                c.tensors[f"early/{name}"] = sketch(part, c.offset(name, parameter, part))
                if c.whole:
                    c.keep(f"whole/{name}", part)
        if self.kept:
            c.event(Rewritten(*c.now, site=self.site, names=tuple(self.kept)))
        self.begin()

    def _keep(self, gradients: list[tuple[str, foreign.Held, Tensor]]) -> None:
        for name, parameter, part in gradients:
            if name not in self.kept and (self.reduced is None or name in self.reduced):
                self.kept[name] = parameter, part.detach().clone()
                self.site = self.site or call_site(self.capture.base)

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


@lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[int, ...]:
    """The places of the arguments into which an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _scales(func: Any, args: tuple[Any, ...]) -> bool:
    name = func._schema.name.partition("::")[2]
    by = args[1] if len(args) > 1 else None
    number = not isinstance(by, (list, tuple)) and (not isinstance(by, Tensor) or by.dim() == 0)
    return name.startswith("_amp_") or (name in SCALING and number)
