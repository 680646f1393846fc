"""ZeRO stage 3: parameters live as row shards, and are whole only while a block computes with them.

A unit is a repeated block of the model; what is left (embeddings, last norm, head) is one more. A unit's rows are
gathered when its forward begins and given back when it ends; gathered again when the gradient of its output arrives,
and each parameter is given back when its own gradient is complete. While one unit computes, the next one's rows are
already on their way, in the order of the step before. Reductions, optimizer and bits are those of stages 1 and 2.

A parameter that is not gathered keeps its shape and reads as NaN: whoever computes with it outside of the model's
forward sees that at once, and needs `engine.full_parameters()`.

All data ranks must call the same units in the same order: each call is a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.comm import ops
from isograd.comm.raw import Group, Handle
from isograd.engine.plan import Slot
from isograd.engine.transport import gather_rows

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class Kept:
    """One parameter as a stage-3 rank keeps it: its rows always, the whole for a while."""

    slot: Slot
    rows: Tensor  # mine, in the parameter's dtype
    whole: Tensor  # its storage is empty while nobody needs it
    users: set[int] = field(default_factory=set)  # ids of units that need it now

    def grow(self) -> None:
        storage = self.whole.untyped_storage()
        storage.resize_(self.whole.numel() * self.whole.itemsize)
        self.slot.rows(self.whole).copy_(self.rows)
        self.slot.parameter.data = self.whole

    def shrink(self, lent: bool = False) -> None:
        """`lent`: others may hold on to the memory, as a NumPy array or a state dict does; it is left to them."""
        parameter = self.slot.parameter
        parameter.data = _unreadable(parameter)
        if lent or not self.whole.untyped_storage().resizable():
            self.whole = torch.empty_like(self.whole)
        self.whole.untyped_storage().resize_(0)


def _unreadable(parameter: nn.Parameter) -> Tensor:
    """One NaN that looks like the whole parameter."""
    value = torch.nan if parameter.is_floating_point() else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


@dataclass(eq=False)
class Unit:
    name: str
    module: nn.Module
    kept: list[Kept] = field(default_factory=list)


class Units:
    def __init__(
        self, model: nn.Module, slots: Sequence[Slot], group: Group, *, keep_gathered: bool, blocks: Iterable[nn.Module]
    ) -> None:
        """`slots`: of every parameter, frozen ones too. keep_gathered: whole from a forward to its backward."""
        self.group, self.keep = group, keep_gathered
        self.in_backward = False
        self._flying: list[Handle] = []
        self._trace: list[Unit] = []  # units in the order of the running forward
        self._after: dict[int, Unit] = {}  # which unit follows which, as the last forward had it
        self._before: dict[int, Unit] = {}
        self._begun: list[Unit] = []  # units whose backward has begun
        self.kept = {id(slot.parameter): self._keep(slot) for slot in slots}
        self.units = _units(model, list(blocks), self.kept)
        self.root = self.units[0]
        self._hooks = []
        for unit in self.units:
            self._hooks.append(unit.module.register_forward_pre_hook(self._entering(unit)))
            self._hooks.append(unit.module.register_forward_hook(self._leaving(unit), always_call=True))
        model._isograd_units = self  # type: ignore[assignment]

    def _keep(self, slot: Slot) -> Kept:
        whole = slot.parameter.data
        if whole.untyped_storage().nbytes() != whole.numel() * whole.itemsize:
            whole = whole.clone()  # a view of something larger, whose memory could not be given back
        kept = Kept(slot, slot.rows(whole).clone(), whole)
        kept.shrink()
        return kept

    # -- what hooks do

    def _entering(self, unit: Unit) -> Any:
        @ops.uncompiled
        def enter(_: nn.Module, __: Any) -> None:
            if self.in_backward:  # a recomputed forward, or one called from a backward
                self._need(unit)
                return
            if unit is self.root:
                self._trace = []
            self._trace.append(unit)
            self._need(unit)
            self._start(self._after.get(id(unit)))

        return enter

    def _leaving(self, unit: Unit) -> Any:
        @ops.uncompiled
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if self.in_backward:
                return
            if unit is self.root:
                self._remember()
            graph = [t for t in tree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            for tensor in graph:
                tensor.register_hook(self._returning(unit))
            if not (self.keep and graph):
                self.release(unit)

        return leave

    def _returning(self, unit: Unit) -> Any:
        def begin(_: Tensor) -> None:
            if unit in self._begun:
                return
            for earlier in self._begun[:-1]:  # frozen parameters of units that are done: no gradient tells of them
                self.release(earlier)
            self._begun = [*self._begun[-1:], unit]
            self._need(unit)
            self._start(self._before.get(id(unit)))

        return begin

    def _remember(self) -> None:
        pairs = list(zip(self._trace, self._trace[1:], strict=False))
        self._after = {id(a): b for a, b in reversed(pairs)}
        self._before = {id(b): a for a, b in pairs if a is not self.root}

    # -- gathering and giving back

    def _need(self, unit: Unit) -> None:
        """Whole before anyone computes with it."""
        self._start(unit)
        self._land()

    def _land(self) -> None:
        for handle in self._flying:
            handle.wait()
        self._flying = []

    def _start(self, unit: Unit | None) -> None:
        if unit is None:
            return
        missing = [kept for kept in unit.kept if not kept.users]
        for kept in unit.kept:
            kept.users.add(id(unit))
        for dtype in dict.fromkeys(kept.slot.parameter.dtype for kept in missing):
            here = [kept for kept in missing if kept.slot.parameter.dtype == dtype]
            for kept in here:
                kept.grow()
            self._flying.append(gather_rows([k.slot for k in here], [k.whole for k in here], self.group))

    def release(self, unit: Unit) -> None:
        for kept in unit.kept:
            if id(unit) in kept.users:
                kept.users.discard(id(unit))
                if not kept.users:
                    self._land()
                    kept.shrink()

    def arrived(self, slot: Slot) -> None:
        """Its gradient is complete: nothing in this backward reads the parameter any more."""
        kept = self.kept[id(slot.parameter)]
        if kept.users:
            self._land()
            kept.users.clear()
            kept.shrink()

    def after_backward(self) -> None:
        self._begun = []
        for unit in self.units:
            self.release(unit)

    def gather_all(self) -> None:
        for unit in self.units:
            self._start(unit)
        self._land()

    @torch.no_grad()
    def take_edits(self) -> None:
        """Keep my rows of what was edited while everything was whole, and give the rest back."""
        for kept in self.kept.values():
            kept.rows.copy_(kept.slot.rows(kept.whole))
            kept.users.clear()
            kept.shrink(lent=True)

    def dissolve(self) -> None:
        """Leave the model whole and without hooks: another engine takes it over."""
        self.gather_all()
        for hook in self._hooks:
            hook.remove()


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists and sequences of modules that have parameters."""
    found: list[nn.Module] = []
    for child in model.children():
        members = [m for m in child.children() if any(True for _ in m.parameters())]
        if isinstance(child, CONTAINERS) and len(members) > 1:
            found += members
        else:
            found += repeated_blocks(child)
    return found


def _units(model: nn.Module, blocks: list[nn.Module], kept: dict[int, Kept]) -> list[Unit]:
    """The root first, with what no block holds; a parameter that several hold belongs to each of them."""
    names = {id(module): name for name, module in model.named_modules()}
    units = [Unit(names[id(block)], block) for block in blocks if block is not model]
    for unit in units:
        unit.kept = [kept[key] for key in dict.fromkeys(id(p) for p in unit.module.parameters())]
    outside = dict.fromkeys(id(p) for p in _outside(model, {id(unit.module) for unit in units}))
    return [Unit("", model, [kept[key] for key in outside]), *units]


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[nn.Parameter]:
    """Parameters of a module and of its children, but for those of blocks."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if id(child) not in blocks:
            yield from _outside(child, blocks)
