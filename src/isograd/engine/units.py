"""ZeRO stage 3: parameters live as row shards, and are whole only while a block computes with them.

A unit is a repeated block of the model; what is left (embeddings, last norm, head) is one more, the root. A block's
rows are gathered when its forward begins and given back when it ends; gathered again when the gradient of its output
arrives or when it is recomputed, and each parameter is given back when its own gradient is complete. The root is whole
from the beginning of the forward on: its head is used last and differentiated first. While one unit computes, the next
one's rows are already on their way, in the order of the step before. Reductions, optimizer and bits are those of stages
1 and 2.

A parameter that is not gathered keeps its shape and reads as NaN: whoever computes with it outside of the model's
forward sees that at once, and needs `engine.full_parameters()`.

All data ranks must call the same units in the same order: each call is a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops
from isograd.comm.raw import Handle
from isograd.engine.first import FirstValues, become
from isograd.engine.plan import Slot
from isograd.engine.transport import gather_rows
from isograd.mesh import DATA, Mesh

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
READER = 0  # a user of parameters that is no unit: someone who looks at all of them


@dataclass(eq=False)
class Kept:
    """One parameter as a stage-3 rank keeps it: its rows always, the whole for a while."""

    slot: Slot
    rows: Tensor  # mine, in the parameter's dtype
    whole: Tensor  # its storage is empty while nobody needs it
    absent: Tensor  # what the parameter is then: one NaN that looks like the whole
    users: set[int] = field(default_factory=set)  # who needs it now: ids of units, READER
    flying: bool = False  # rows of it are on the wire

    def grow(self) -> None:
        storage = self.whole.untyped_storage()
        storage.resize_(self.whole.numel() * self.whole.itemsize)
        self.slot.rows(self.whole).copy_(self.rows, non_blocking=True)
        self.slot.parameter.data = self.whole

    def shrink(self, lent: bool = False) -> None:
        """`lent`: others may hold on to the memory, as a NumPy array or a state dict does; it is left to them."""
        self.slot.parameter.data = self.absent
        if lent or not self.whole.untyped_storage().resizable():
            self.whole = torch.empty_like(self.whole)
        self.whole.untyped_storage().resize_(0)


def unreadable(like: Tensor, device: torch.device) -> Tensor:
    """One NaN that looks like the whole."""
    value = torch.nan if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


@dataclass(eq=False)
class Unit:
    name: str
    module: nn.Module
    kept: list[Kept] = field(default_factory=list)


class Units:
    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        mesh: Mesh,
        first: FirstValues,
        *,
        blocks: Sequence[nn.Module],
        keep_gathered: bool,
        offload: bool,
    ) -> None:
        """`slots`: of every parameter, frozen ones too. keep_gathered: whole from a forward to its backward."""
        group = mesh.group(DATA)
        home = torch.device("cpu") if offload else mesh.device
        self.group, self.keep = group, keep_gathered
        self._in_forward = self._in_backward = False  # of the whole model
        self._readers = 0
        self._flying: list[tuple[Handle, list[Kept]]] = []
        self._trace: list[Unit] = []  # units in the order of the running forward
        self._after: dict[int, Unit] = {}  # which unit follows which, as the last forward had it
        self._before: dict[int, Unit] = {}
        self._held: set[int] = set()  # units that stay whole until their backward
        self._begun: list[Unit] = []  # the blocks whose backward began last, two at most
        self._open: Counter[int] = Counter()  # forwards of a block whose gradient has not come back yet
        self._passed: Callable[[set[int]], None] | None = None  # is told of parameters that backward has left behind
        self.kept = {id(slot.parameter): _keep(slot, first, mesh.device, home) for slot in slots}
        self.units = _units(model, blocks, self.kept)
        self._homes = homes(blocks)
        self.root = self.units[0]
        self._hooks = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True),
            model.register_forward_hook(self._forward_ends, always_call=True),
        ]
        for unit in self.units:
            for module in [unit.module] if unit is not self.root else _owners(self.root, self.units):
                self._hooks.append(module.register_forward_pre_hook(self._entering(unit), prepend=True))
                self._hooks.append(module.register_forward_hook(self._leaving(unit), always_call=True))
        model._isograd_units = self  # type: ignore[assignment]

    # -- forward

    @ops.uncompiled
    def _forward_begins(self, _: nn.Module, __: Any) -> None:
        if not self._in_backward:  # else a recomputed forward
            self._in_forward, self._trace = True, [self.root]
            self._need(self.root)
            self._start(self._after.get(id(self.root)))

    @ops.uncompiled
    def _forward_ends(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._in_backward:
            return
        self._in_forward = False
        self._remember()
        if differentiable(output):
            self._held.add(id(self.root))
        else:  # an evaluation, or an error: no backward will come
            self._held.clear()
        self._give_back_all(but=self._held)

    def _entering(self, unit: Unit) -> Any:
        @ops.uncompiled
        def enter(_: nn.Module, __: Any) -> None:
            if self._in_backward:  # a recomputed forward, or one called from a backward
                self._begin(unit)
            elif unit is not self.root or not self._in_forward:
                self._need(unit)
            if self._in_forward and unit is not self.root:
                self._trace.append(unit)
                self._start(self._after.get(id(unit)))

        return enter

    def _leaving(self, unit: Unit) -> Any:
        @ops.uncompiled
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if self._in_backward or (unit is self.root and self._in_forward):
                return
            graph = differentiable(output)
            self._open[id(unit)] += bool(graph)
            waiting = [True] * bool(graph)
            for tensor in graph:
                tensor.register_hook(lambda _: self._returned(unit, waiting))
            if self.keep and graph:
                self._held.add(id(unit))
            else:
                self._give_back(unit)

        return leave

    def _remember(self) -> None:
        """The order of this forward is what the next one, and its backward, are expected to follow."""
        pairs = list(zip(self._trace, self._trace[1:], strict=False))
        self._after = {id(a): b for a, b in reversed(pairs)}
        self._before = {id(b): a for a, b in pairs if a is not self.root}
        self._before[id(self.root)] = self._trace[-1]

    # -- backward

    def begin_backward(self, passed: Callable[[set[int]], None] | None) -> None:
        """`passed` may send what backward has left behind: at the same points on all ranks."""
        self._in_backward, self._passed = True, passed
        self._begin(self.root)

    def _returned(self, unit: Unit, waiting: list[bool]) -> None:
        """The gradient of an output has come back; of several, the first one counts."""
        if waiting:
            waiting.clear()
            self._open[id(unit)] -= 1
        if unit not in self._begun:
            self._begin(unit)

    def _begin(self, unit: Unit) -> None:
        """The backward of a unit begins, or goes on with another call of it."""
        if unit is not self.root and unit not in self._begun:
            for earlier in self._begun[:-1]:  # done: gradients tell of its trainable parameters, nothing of the others
                self._give_back(earlier, frozen_only=True)
            last = self._begun[-1] if self._begun else self.root
            if self._passed and last is not self.root and not self._open[id(last)]:
                self._passed({key for key, module in self._homes.items() if module is last.module})
            self._begun = [*self._begun[-1:], unit]
        self._need(unit)
        self._start(self._before.get(id(unit)))

    def arrived(self, slot: Slot) -> None:
        """Its gradient is complete: nothing in this backward reads the parameter any more."""
        self._free(self.kept[id(slot.parameter)], None)

    def end_backward(self) -> None:
        self._in_backward = False
        self._begun = []
        self._held.clear()
        self._give_back_all(but=self._held)

    # -- gathering and giving back

    def _need(self, unit: Unit) -> None:
        """Whole before anyone computes with it."""
        self._start(unit)
        self._land()

    def _land(self) -> None:
        for handle, arriving in self._flying:
            handle.wait()
            for kept in arriving:
                kept.flying = False
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
                kept.flying = True
            handle = gather_rows([k.slot for k in here], [k.whole for k in here], self.group)
            self._flying.append((handle, here))

    def _give_back(self, unit: Unit, *, frozen_only: bool = False) -> None:
        for kept in unit.kept:
            if not (frozen_only and kept.slot.parameter.requires_grad):
                self._free(kept, id(unit))

    def _give_back_all(self, but: set[int]) -> None:
        for unit in self.units:
            if id(unit) not in but:
                self._give_back(unit)

    def _free(self, kept: Kept, user: int | None) -> None:
        """One user less (None: no unit uses it any more); the last one turns off the light."""
        if not kept.users:
            return
        kept.users = kept.users & {READER} if user is None else kept.users - {user}
        if not kept.users:
            if kept.flying:
                self._land()
            kept.shrink()

    # -- everything whole

    def gather_all(self) -> None:
        self._readers += 1
        self._gather_for_readers()

    def _gather_for_readers(self) -> None:
        for unit in self.units:
            self._start(unit)
            for kept in unit.kept:
                kept.users.add(READER)
        self._land()

    @torch.no_grad()
    def take_edits(self) -> None:
        """Keep my rows of what was edited while everything was whole, and give the rest back."""
        for kept in self.kept.values():
            kept.rows.copy_(kept.slot.rows(kept.whole))
        self._readers -= 1
        if not self._readers:
            for kept in self.kept.values():
                kept.users.clear()
                kept.shrink(lent=True)

    def stepped(self) -> None:
        """The optimizer has changed rows: what is still whole is out of date."""
        self._land()
        self._held.clear()
        self._open.clear()
        for kept in self.kept.values():
            if kept.users:
                kept.users.clear()
                kept.shrink()
        if self._readers:
            self._gather_for_readers()

    def dissolve(self) -> None:
        """Leave the model whole and without hooks: another engine takes it over."""
        self.gather_all()
        for hook in self._hooks:
            hook.remove()


def _keep(slot: Slot, first: FirstValues, device: torch.device, home: torch.device) -> Kept:
    """My rows of a parameter, at `home`, and the parameter without memory."""
    parameter = slot.parameter
    rows = first.rows(slot, slot.cuts[slot.owner : slot.owner + 2])
    absent = unreadable(parameter, device if parameter.is_meta else parameter.device)
    if parameter.is_meta:
        become(parameter, absent)
        whole = torch.empty_like(absent, memory_format=torch.contiguous_format)
    else:
        whole = parameter.data
    if whole.untyped_storage().nbytes() != whole.numel() * whole.itemsize:
        whole = whole.clone()  # a view of something larger, whose memory could not be given back
    rows = slot.rows(whole).clone() if rows is None else rows
    kept = Kept(slot, on_host(rows) if home.type == "cpu" else rows, whole, absent)
    kept.shrink()
    return kept


def on_host(rows: Tensor) -> Tensor:
    """In the host's memory; pinned where a GPU will fetch it."""
    return rows.cpu().pin_memory() if rows.is_cuda else rows


def differentiable(output: Any) -> list[Tensor]:
    """Tensors with a graph, in whatever a module returns."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    inside: Iterable[Any] = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, list | tuple | set):
        inside = output
    elif is_dataclass(output) and not isinstance(output, type):
        inside = [getattr(output, f.name) for f in fields(output)]
    return [tensor for part in inside for tensor in differentiable(part)]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists and sequences of modules that have parameters."""
    members = [m for m in model.children() if any(True for _ in m.parameters())]
    if isinstance(model, CONTAINERS) and len(members) > 1:
        return members
    return [block for child in model.children() for block in repeated_blocks(child)]


def homes(blocks: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """The block of each parameter (by id) that only one block holds: it has its gradient when that one is done."""
    pairs = [(id(p), block) for block in dict.fromkeys(blocks) for p in dict.fromkeys(block.parameters())]
    holders = Counter(key for key, _ in pairs)
    return {key: block for key, block in pairs if holders[key] == 1}


def _units(model: nn.Module, blocks: Sequence[nn.Module], kept: dict[int, Kept]) -> list[Unit]:
    """The root first, with what no block holds; a parameter that several hold belongs to each of them."""
    names = {id(module): name for name, module in model.named_modules()}
    units = [Unit(names[id(block)], block) for block in dict.fromkeys(blocks) if block is not model]
    for unit in units:
        unit.kept = [kept[key] for key in dict.fromkeys(id(p) for p in unit.module.parameters())]
    outside = dict.fromkeys(
        id(p) for m in _outside(model, {id(u.module) for u in units}) for p in m.parameters(recurse=False)
    )
    return [Unit("", model, [kept[key] for key in outside]), *units]


def _owners(root: Unit, units: list[Unit]) -> list[nn.Module]:
    """The modules that hold the root's parameters: called without the whole model, each gathers them."""
    outside = dict.fromkeys(_outside(root.module, {id(unit.module) for unit in units[1:]}))
    return [m for m in outside if m is not root.module and any(True for _ in m.parameters(recurse=False))]


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """A module and its children, but for blocks."""
    yield module
    for child in module.children():
        if id(child) not in blocks:
            yield from _outside(child, blocks)
