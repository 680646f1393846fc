"""Every piece of memory that a program takes during a rehearsed step: how large, whose, from when to when.

A *moment* is the number of pieces that were taken or given back before. Pieces smaller than LEAST are left out. Whose a
piece is follows from the place in the program that took it, until the program's parameters, gradients and optimizer
state are named (plan/rehearse.py).
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

LEAST = 1024  # bytes
PARAMETERS, OPTIMIZER, GRADIENTS, FLIGHTS, ACTIVATIONS, BACKWARD, OTHER = KINDS = (
    "parameters", "optimizer", "gradients", "buckets in flight", "activations", "backward", "other",
)  # fmt: skip
_PACKAGE = __file__[: -len("plan/allocations.py")]
_SKIPPED = (_PACKAGE + "plan/", _PACKAGE + "comm/")
_FLIGHTS = ("engine/reducer.py", "engine/packing.py")
_GRADIENTS = (
    "engine/step.py:collect",
    "engine/step.py:_all_reduce_partials",
    "engine/reducer.py:zeros_of",
    "nn/split_backward.py:weight_grads",
)
# Functions of the engine and of the pipeline, and what a program does in them.
_PHASES = {
    "engine/engine.py:accumulate": "forward",
    "engine/engine.py:count": "count",
    "engine/engine.py:_reduce": "reduction",
    "engine/zero.py:step": "optimizer",
    "engine/zero.py:_write_back": "gather of parameters",
    "engine/step.py:end": "backward",
    "engine/step.py:run_backward": "backward",
}


class Allocation(NamedTuple):
    """One piece of memory."""

    bytes: int
    born: int  # a moment
    died: int  # a moment
    kind: str
    owner: str


class _Ref(ref[Any]):
    """To the memory of a piece."""

    __slots__ = ("key",)
    key: int


class Allocations:
    """What a program holds and has held."""

    def __init__(self) -> None:
        self.moment = 0
        self.phases: list[tuple[int, str]] = []  # from which moment on the program did what
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._died: dict[int, int] = {}
        self._whose: list[tuple[str, str]] = []
        self._alive: dict[int, int] = {}  # storage -> number
        self._refs: dict[int, _Ref] = {}
        self._known: dict[CodeType, tuple[str, str]] = {}

    def take(self, tensor: Tensor, memory: Any = None) -> None:
        """A tensor was made. `memory` lives as long as its memory would; without it, the tensor's own does."""
        storage = tensor.untyped_storage()
        size, key = storage.nbytes() if memory is None else memory.nbytes, storage._cdata
        if size < LEAST or key in self._alive:
            return
        self._add(key, size, self._place())

        self._refs[key] = _Ref(storage if memory is None else memory, self._forget)
        self._refs[key].key = key

    def resized(self, tensor: Tensor) -> None:
        """The program has changed the size of a tensor's memory, perhaps to nothing."""
        storage = tensor.untyped_storage()
        number = self._alive.get(storage._cdata)
        if number is not None and self._sizes[number] != storage.nbytes():
            self._end(storage._cdata)
            self._add(storage._cdata, storage.nbytes(), self._whose[number])

    def name(self, tensor: Tensor, kind: str, owner: str) -> None:
        """Say whose the memory of a tensor is."""
        number = self._alive.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self._whose[number] = kind, owner

    def pieces(self) -> list[Allocation]:
        """All pieces, in the order in which they were taken."""
        columns = zip(self._sizes, self._born, self._whose, strict=True)
        return [Allocation(s, b, self._died.get(n, self.moment), *k) for n, (s, b, k) in enumerate(columns)]

    def _add(self, key: int, size: int, whose: tuple[str, str]) -> None:
        self._alive[key] = len(self._sizes)
        self._sizes.append(size)
        self._born.append(self.moment)
        self._whose.append(whose)
        self.moment += 1

    def _forget(self, memory: _Ref) -> None:
        self._end(memory.key)
        del self._refs[memory.key]

    def _end(self, key: int) -> None:
        self._died[self._alive.pop(key)] = self.moment
        self.moment += 1

    def _place(self) -> tuple[str, str]:
        """(kind, owner) by the place in the program; notes what the program does now."""
        known, site = self._known, ""
        phase = "backward" if torch._C._current_graph_task_id() != -1 else ""
        frame = sys._getframe(2)
        while frame is not None and not (site and phase):
            place, does = known.get(frame.f_code) or self._of_code(frame.f_code)
            site, phase = site or place, phase or does
            frame = frame.f_back  # type: ignore[assignment]
        if not phase:
            phase = self.phases[-1][1] if self.phases else "build"
        elif not self.phases or self.phases[-1][1] != phase:
            self.phases.append((self.moment, phase))
        file = site.partition(":")[0]
        if site in _GRADIENTS:
            return GRADIENTS, site
        if file in _FLIGHTS:
            return FLIGHTS, site
        if phase == "forward" or (phase == "backward" and not file.startswith("engine/")):
            return ACTIVATIONS, site  # computed again in backward, or for a gradient by a layer of isograd
        return (BACKWARD if phase == "backward" else OTHER), site

    def _of_code(self, code: CodeType) -> tuple[str, str]:
        """(file:function, phase) of code of this package; ("", "") of any other."""
        found = self._known.get(code)
        if found is None:
            file = code.co_filename
            ours = file.startswith(_PACKAGE) and not file.startswith(_SKIPPED)
            site = f"{file[len(_PACKAGE) :]}:{code.co_name}" if ours else ""
            found = self._known[code] = site, _PHASES.get(site, "")
        return found
