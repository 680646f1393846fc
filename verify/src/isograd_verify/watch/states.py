"""Sees what modules carry from step to step enter a loss: a running mean that it subtracts, a size that it divides by.

Tensors of modules that are called, and of variables around the first call of a micro-batch, that have changed since
they were first seen are marked, and followed as results of collectives are (flows.py) to what a backward begins with.
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
from isograd_verify.watch.variables import variables, walk

MOST_ELEMENTS = 1 << 16
SAMPLES = 64  # of a variable's elements: where most stay as they were, it is filled row by row
SPREAD = "the deviation of"
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")


class States:
    """Told of calls of modules and of operators."""

    def __init__(self, capture: Recorder) -> None:
        self.capture, self.flows = capture, Flows()
        self.began: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()  # hashes, as first seen
        self.seen: list[tuple[str, str, str, Tensor]] = []  # of each mark: name, hash at first, own hash, contents
        self.used: dict[int, str] = {}  # of a mark: the line that made something of it first
        self.variables: dict[str, str] = {}  # hashes of the program's variables; '' of one that came in a later step
        self.samples: dict[str, Tensor] = {}  # some of their elements, as first seen
        self.places: dict[str, int] = {}  # the program's functions, and when they were first on the stack
        self.at = (0, 0)  # step and backwards when variables were last looked at
        self.rows: set[int] = set()  # sizes along which the rows of a batch may lie

    def called(self, module: nn.Module, args: Any) -> None:
        """A module is about to be called; the outermost one from functions that may carry something themselves."""
        given = foreign.tensors_in(args)
        self.rows = {n for t in given for n in row_sizes(t.shape, dtype_name(t))} or self.rows
        name, began = self.capture.modules.get(module) or type(module).__name__, self.began.setdefault(module, {})
        inside = self.capture.modules.get(module, "")
        for key, value in (*module._buffers.items(), *vars(module).items()):
            own = self.capture.buffers.get(f"{inside}.{key}".lstrip("."), "")  # before a wrapper made it rank 0's
            if self._follows(value):
                self._look(f"{name}.{key}", key, value, began, own)
        now = self.capture.step, self.capture.backwards
        if not self.capture.stack and now != self.at:
            self.at = now
            self._around(given)

    def _around(self, given: list[Tensor]) -> None:
        """Variables of the functions around the first call of a micro-batch, each tensor once."""
        seen = {id(t) for t in given}
        for place, values in variables():
            late = self.places.setdefault(place, self.capture.step) < self.capture.step
            for name, value in values.items():
                for path, one in [(name, value)] if isinstance(value, Tensor) else walk(value, name, 0):
                    if id(one) in seen or not self._follows(one):
                        continue
                    seen.add(id(one))
                    key, sample = f"{place}/{path}", one.detach().reshape(-1)[:: 1 + one.numel() // SAMPLES]
                    shaped = f"{key} {tuple(one.shape)}"
                    if shaped not in self.variables:
                        self.variables[shaped] = "" if late and one.dim() else digest(one)
                        self.samples[shaped] = sample.clone()
                    first = self.samples[shaped]
                    if not self.variables[shaped] or 2 * int((sample != first).sum()) > len(first):
                        self._look(path, key, one, self.variables)

    def _follows(self, value: Any) -> bool:
        if type(value) is not Tensor or value.requires_grad or not value.is_floating_point():
            return False
        return 0 < value.numel() <= MOST_ELEMENTS and not self.rows & {*value.shape} and not foreign.imagined(value)

    def _look(self, name: str, key: str, value: Tensor, began: dict[str, str], own: str = "") -> None:
        hashed = digest(value)
        first = began.setdefault(f"{key} {tuple(value.shape)}", hashed)  # a table that grows with the rows is no mean
        if hashed != first:
            self.flows.mark(value, {len(self.seen): CUT})
            self.seen.append((name, first, own or hashed, value.detach().clone()))

    def spread(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """The deviation of a batch's rewards or advantages, one for each row, is a statistic of this rank's rows."""
        given = args[0]
        if type(result) is Tensor and not result.dim() and given.dim() == 1 and not given.requires_grad:
            self.flows.mark(result, {len(self.seen): CUT})
            site = self.used[len(self.seen)] = foreign.call_site(self.capture.base)
            self.seen.append((f"{SPREAD} {len(given)} numbers at {site}", "", digest(given), given.clone()))

    def carry(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator was run. A batch norm that trains is given its statistics and does not use them."""
        name = func._schema.name.partition("::")[2]
        if "batch_norm" in name and (len(args) < 6 or args[5] is not False):
            return
        if name in OVERWRITES and args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes():
            self.reduced([args[0]])
        for number in self.flows.carry(func, args, kwargs, result).keys() - self.used.keys():
            self.used[number] = foreign.call_site(self.capture.base)

    def reduced(self, tensors: list[Tensor]) -> None:
        """Tensors hold nothing of one rank's own any more."""
        for tensor in strided(tensors):
            self.flows.marks.pop(memory(tensor), None)

    def begin(self, roots: list[Tensor]) -> None:
        """A backward begins with these."""
        for number in self.flows.of(strided(roots)):
            name, began, own, value = self.seen[number]
            if name.startswith(SPREAD) and len(value) not in self.rows:
                continue
            self.capture.tensors[f"carried/{name}"] = sketch(value)
            site = self.used.get(number, "")
            self.capture.event(Carried(*self.capture.now, name=name, began=began, own=own, site=site))

    def clear(self) -> None:
        """A step is over."""
        self.flows.marks.clear()
        self.seen.clear()
        self.used.clear()
