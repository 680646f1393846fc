"""Sees what modules carry from step to step enter a loss: a running mean that it subtracts, a size that it divides by.

Buffers and other tensors of a module are looked at when it is called; where one device is to be compared, those in
variables around the outermost one, too.
Those that have changed since they were first seen are marked, and followed as results of collectives are (flows.py) to
what a backward begins with. Not followed are large ones, those with a row for each of the batch (a recurrent state
belongs to its rows), and what ranks have reduced.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from isograd_verify.record.events import CUT, Carried
from isograd_verify.record.sketch import digest, dtype_name, row_sizes, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.flows import Flows, memory, strided
from isograd_verify.watch.recorder import Recorder
from isograd_verify.watch.variables import variables

MOST_ELEMENTS = 1 << 16
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")


class States:
    """Told of calls of modules and of operators."""

    def __init__(self, capture: Recorder) -> None:
        self.capture, self.flows = capture, Flows()
        self.began: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()  # hashes, as first seen
        self.seen: list[tuple[str, str, str, Tensor]] = []  # of each mark: name, hash at first, own hash, contents
        self.variables: dict[str, str] = {}  # the same of the program's functions
        self.rows: set[int] = set()  # sizes along which the rows of a batch may lie

    def called(self, module: nn.Module, args: Any) -> None:
        """A module is about to be called; the outermost one from functions that may carry something themselves."""
        given = foreign.tensors_in(args)
        self.rows = {n for t in given for n in row_sizes(t.shape, dtype_name(t))} or self.rows
        name, began = self.capture.modules.get(module) or type(module).__name__, self.began.setdefault(module, {})
        inside = self.capture.modules.get(module, "")
        for key, value in (*module._buffers.items(), *vars(module).items()):
            own = self.capture.buffers.get(f"{inside}.{key}".lstrip("."), "")  # before a wrapper made it rank 0's
            self._look(f"{name}.{key}", key, value, began, own)
        # Python keeps what it has told of a function's variables, and so their tensors, until the function ends.
        for place, values in variables() if self.capture.beside and not self.capture.stack else ():
            for key, value in values.items():
                if not any(value is t for t in given):
                    self._look(key, f"{place}/{key}", value, self.variables)

    def _look(self, name: str, key: str, value: Any, began: dict[str, str], own: str = "") -> None:
        if type(value) is not Tensor or value.requires_grad or not value.is_floating_point():
            return
        if not 0 < value.numel() <= MOST_ELEMENTS or self.rows & {*value.shape} or foreign.imagined(value):
            return
        hashed = digest(value)
        first = began.setdefault(f"{key} {tuple(value.shape)}", hashed)  # a table that grows with the rows is no mean
        if hashed != first:
            self.flows.mark(value, {len(self.seen): CUT})
            self.seen.append((name, first, own or hashed, value.detach().clone()))

    def carry(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator was run. A batch norm that trains is given its statistics and does not use them."""
        name = func._schema.name.partition("::")[2]
        if "batch_norm" in name:
            return
        if name in OVERWRITES and args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes():
            self.reduced([args[0]])
        self.flows.carry(func, args, kwargs, result)

    def reduced(self, tensors: list[Tensor]) -> None:
        """Tensors hold nothing of one rank's own any more."""
        for tensor in strided(tensors):
            self.flows.marks.pop(memory(tensor), None)

    def begin(self, roots: list[Tensor]) -> None:
        """A backward begins with these."""
        for number in self.flows.of(strided(roots)):
            name, began, own, value = self.seen[number]
            self.capture.tensors[f"carried/{name}"] = sketch(value)
            self.capture.event(Carried(*self.capture.now, name=name, began=began, own=own))

    def clear(self) -> None:
        """A step is over."""
        self.flows.clear()
        self.seen.clear()
