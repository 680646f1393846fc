"""Which collectives without a backward have a say in the loss: those are wrong, one for a metric is not.

Such a call on a tensor that needs a gradient leaves a mark on what it returns, and every operator passes marks on to
what it makes; tensors are known by their memory. The marks of what a backward begins with tell which calls count:

    cut      no gradient comes back through the call
    others   only what other ranks gave reaches the loss: this rank's own part was put back in, with its gradient
    kept     the call changed its tensor in place, and backward passes it as if nothing had been called
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from isograd_verify.record.events import CUT, KEPT, OTHERS
from isograd_verify.watch import foreign

OUTPUTS = ("output_tensors", "output_tensor", "output", "outputs", "output_lists")
Marks = dict[int, str]  # the collective's number -> how


class Flows:
    """Which results of collectives without a backward are in which memory."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a storage from being given to another one.
        self.marks: dict[int, tuple[StorageWeakRef, Marks]] = {}

    def begin(self, number: int, op: str, named: dict[str, Any], result: Any, ranks: tuple[int, ...]) -> None:
        """A collective without a backward was called; `named`: its arguments."""
        given = {memory(t) for k, v in named.items() if k not in OUTPUTS for t in strided(v)}
        me, several = foreign.world()[0], strided(named.get("output_tensors"))
        own = memory(several[ranks.index(me)]) if op == "all_gather" and len(several) == len(ranks) > 1 else None
        for t in [*(t for k in OUTPUTS for t in strided(named.get(k))), *strided(result)]:
            how = KEPT if memory(t) in given else CUT
            if own is not None and memory(t) != own:
                how = OTHERS
            self.mark(t, {number: how})

    def travel(self, named: dict[str, Any], result: Any) -> None:
        """A collective was called on what may be cut: all ranks run one program, so what comes back is cut as well."""
        given = self.of(t for k, v in named.items() if k not in OUTPUTS for t in strided(v))
        cut = {number: how for number, how in given.items() if how == CUT}
        for t in [*(t for k in OUTPUTS for t in strided(named.get(k))), *strided(result)] if cut else ():
            if t.is_floating_point() or t.is_complex():
                self.mark(t, cut)

    def carry(self, func: Any, args: Any, kwargs: Any, result: Any) -> Marks:
        """An operator was run; the marks of what it was given."""
        name = func._schema.name.partition("::")[2]
        if name.endswith("_like") or name.startswith("new_"):
            return {}  # a shape, and no values
        found = self.of([*strided(args), *strided(list(kwargs.values()))])
        if not found:
            return found
        places = zip(func._schema.arguments, args, strict=False)
        written = [v for a, v in places if a.alias_info is not None and a.alias_info.is_write]
        if name == "copy_" and args[1].requires_grad:
            # Over a part of what was gathered: the own part, in every known use.
            known = self.marks.get(memory(args[0]), (None, {}))[1]
            known |= {number: OTHERS for number, how in known.items() if how == CUT}
            found = self.of(strided(args))
        for t in [*strided(written), *strided(result)]:
            if t.is_floating_point() or t.is_complex():  # a choice among numbers has no gradient to lose
                self.mark(t, found)
        return found

    def of(self, tensors: Iterable[Tensor]) -> Marks:
        """The marks of some tensors, together."""
        found: Marks = {}
        for t in tensors:
            for number, how in self.marks.get(memory(t), (None, {}))[1].items():
                found[number] = min(how, found.get(number, how))
        return found

    def mark(self, t: Tensor, marks: Marks) -> None:
        """Adds marks to a tensor's memory."""
        key = memory(t)
        if key not in self.marks:
            self.marks[key] = StorageWeakRef(t.untyped_storage()), {}
        known = self.marks[key][1]
        known |= {number: min(how, known.get(number, how)) for number, how in marks.items()}


def memory(t: Tensor) -> int:
    """Names a tensor's memory while a StorageWeakRef to it is kept; later its address may be another tensor's."""
    return int(t.untyped_storage()._cdata)


def strided(values: Any) -> list[Tensor]:
    """The plain tensors in a nest of lists; results that are waited for later stand for themselves."""
    local = (foreign.local(getattr(t, "elem", t)) for t in foreign.tensors_in(values))
    return [t for t in local if t.layout is torch.strided]
