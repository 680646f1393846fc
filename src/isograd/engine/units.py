"""ZeRO stage 3: parameters live as row shards, and are whole only while a block computes with them.

A unit is a repeated block of the model; what is left (embeddings, last norm, head) is one more, the root. A block's
rows are gathered when its forward begins and given back when it ends; gathered again when the gradient of its output
arrives or when it is recomputed, and given back when the gradient of the next block's output arrives: autograd runs
operations in the reverse order of the forward, so nothing that this block saved is read after that. The root is whole
from the beginning of the forward until the end of backward; without a pipeline, the last block from its forward to its
backward. While one unit computes, the next one's rows are on their way, in the order of the step before. Reductions,
optimizer and bits are those of stages 1 and 2.

A parameter that is not gathered keeps its shape and reads as NaN: code that computes with it outside of the model's
forward gets NaN at once, and needs `engine.full_parameters()`.

All data ranks must call the same units in the same order: each call is a collective. engine/lockstep.py compares what
they call, and when an exception ends a forward or a backward of one rank, it tells the others. `abort` then brings a
rank back to the state between two steps.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isograd.engine.blocks import homes
from isograd.engine.first import FirstValues
from isograd.engine.hooks import Hook, Named, guard_state, refuse_absent
from isograd.engine.kept import Kept, alike, keep
from isograd.engine.lockstep import MEETING, Lockstep, Posted
from isograd.engine.plan import Slot
from isograd.engine.transport import gather_rows
from isograd.errors import EngineError, headline
from isograd.mesh import DATA, STAGE, Mesh

READER = 0  # a user of parameters that is no unit: someone who looks at all of them
RETURNED = "_isograd_returned"  # of a tensor that a block has returned: how many calls had begun, and its version
LATE_READ = """ZeRO 3: a backward read a parameter after its block was given back. The gradient of a block
must come back through what its forward returns, once; see 'Limits' in docs/zero.md."""


@dataclass(eq=False)
class Unit:
    """What is gathered together: a block of the model, or the root."""

    name: str
    number: int  # the same on all ranks
    module: nn.Module
    kept: list[Kept] = field(default_factory=list)

    @property
    def words(self) -> str:
        """For errors."""
        return f"block {self.name!r}" if self.number else "what is outside of all blocks"


class Units:
    """Gathers units when the model uses them, and gives them back."""

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
        self.keep, self._where = keep_gathered, mesh.where()
        owners = {slot.owners.ranks: slot.owners for slot in slots}
        within = all(set(ranks) <= set(mesh.ranks(DATA)) for ranks in owners)  # not where experts are folded over tp
        self._lockstep = Lockstep(mesh.group(DATA if within else STAGE), list(owners.values()), self._where)
        self._in_forward = self._in_backward = False  # of the whole model
        self._outer: BaseException | None = None  # being handled when the forward or the backward began
        self._round: int | None = None  # of the lockstep, in which a forward or a backward began that is not over
        self._readers = 0
        self._calls = 0  # of blocks, that have begun
        self._alone = mesh.layout.pp == 1  # a step's backward follows its forward, and begins with the last block
        self._chunks = mesh.layout.vpp > 1  # forwards take turns between blocks that are not the same ones
        self._flying: list[tuple[Posted, list[Kept]]] = []
        self._left: Posted | None = None  # said when backward left the last block that it did not gather anew
        self._ended: Posted | None = None  # said at the end of the last backward
        self._trace: list[Unit] = []  # units in the order of the running forward
        self._after: dict[int, Unit] = {}  # which unit follows which, as the last forward had it
        self._before: dict[int, Unit] = {}
        self._held: set[int] = set()  # units that stay whole until their backward
        self._whole: dict[int, Unit] = {}  # that may be whole: no other one is
        self._open: Counter[int] = Counter()  # forwards of a block whose gradient has not come back yet
        self._recomputed: set[int] = set()  # units called in the running backward, whose own backward has not begun
        self._passed: Callable[[set[int]], None] | None = None  # is told of parameters that backward has left behind
        self.kept = keep(slots, first, mesh, torch.device("cpu") if offload else mesh.device)
        self.units = _units(model, blocks, self.kept)
        self._homes = homes(blocks)
        self.root = self.units[0]
        self._lockstep.make_room([unit.kept for unit in self.units])
        self._current = self.root  # whose backward began last
        self.named: Named = lambda _: None  # a door names lost ranks
        self._hooks = self._hook_into(model)
        model._isograd_units = self  # type: ignore[assignment]

    def _hook_into(self, model: nn.Module) -> list[Any]:
        begins = Hook(self._forward_begins, self._refuse_absent, self._name)
        ends = Hook(self._forward_ends, self._refuse_absent, self._name)
        handles: list[Any] = [
            model.register_forward_pre_hook(begins, prepend=True),
            model.register_forward_hook(ends, always_call=True),
        ]
        for unit in self.units:
            for module in [unit.module] if unit is not self.root else _owners(self.root, self.units):
                begun: list[int] = []  # numbers of the calls of this module that are not over
                entering = Hook(self._entering(unit, begun), self._refuse_absent, self._name)
                leaving = Hook(self._leaving(unit, begun), self._refuse_absent, self._name)
                handles.append(module.register_forward_pre_hook(entering, prepend=True))
                handles.append(module.register_forward_hook(leaving, always_call=True))
        for module in model.modules():
            if module is model or any(True for _ in module.parameters(recurse=False)):
                handles += guard_state(module, self._refuse_absent)
        return handles

    def _name(self, error: BaseException) -> BaseException | None:
        return self.named(error)

    # -- forward

    def _forward_begins(self, _: nn.Module, __: Any) -> None:
        if self._in_backward:  # a recomputed forward
            return
        if self._in_forward:  # what torch does not tell hooks about: KeyboardInterrupt, for one
            self.abort("its forward was interrupted")
        self._in_forward, self._trace, self._outer = True, [self.root], sys.exception()
        self._current = self.root
        self._began()
        self._need(self.root)
        self._start(self._after.get(id(self.root)))

    def _forward_ends(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._in_backward or not self._in_forward:
            return
        error = _raised(self._outer)
        if error is not None:
            self.abort(f"failed in forward: {headline(error)}")
            return
        self._in_forward = False
        graph = differentiable(output)
        if graph:
            self._held.add(id(self.root))
        else:
            self._held.clear()
            self._round = None
        self._give_back_all(but=self._held)
        if not graph:  # an evaluation: no backward will come, whose notes are unlike those of a forward
            self._meet("ends its forward")
        self._remember()

    def _entering(self, unit: Unit, begun: list[int]) -> Callable[..., None]:
        def enter(_: nn.Module, __: Any) -> None:
            self._calls += 1
            begun.append(self._calls)
            if self._in_backward:  # a recomputed forward, or one called from a backward
                self._recomputed.add(id(unit))
                self._need(unit)
            elif unit is not self.root or not self._in_forward:
                self._need(unit)
            if self._in_forward and unit is not self.root:
                self._trace.append(unit)
                self._start(self._after.get(id(unit)))

        return enter

    def _leaving(self, unit: Unit, begun: list[int]) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            since = begun.pop() if begun else self._calls
            if unit is self.root and (self._in_forward or self._in_backward):
                return
            # What an earlier block returned and this one passes on comes back through that block: freed for this one's
            # sake, it would compute its gradients with what is not there.
            graph = [tensor for tensor in differentiable(output) if not _passed_on(tensor, since)]
            waiting = [True] * bool(graph and not self._in_backward)
            for tensor in graph:
                setattr(tensor, RETURNED, (self._calls, tensor._version))
                tensor.register_hook(lambda _: self._returned(unit, waiting))
            if self._in_backward:
                return
            self._open[id(unit)] += bool(graph)
            if graph and (self.keep or (self._alone and unit is self._before.get(id(self.root)))):
                self._held.add(id(unit))
            else:
                self._give_back(unit)

        return leave

    def _remember(self) -> None:
        """The order of this forward is what the next one, and its backward, are expected to follow. Of chunks of a
        pipeline, nobody knows which one comes next: each has its own order, and no first block."""
        pairs = list(zip(self._trace, self._trace[1:], strict=False))
        after = {id(a): b for a, b in reversed(pairs)}
        before = {id(b): a for a, b in pairs if a is not self.root}
        if self._chunks:
            after.pop(id(self.root), None)
            self._after, self._before = self._after | after, self._before | before
        else:
            self._after, self._before = after, {**before, id(self.root): self._trace[-1]}

    # -- backward

    def begin_backward(self, passed: Callable[[set[int]], None] | None) -> None:
        """`passed` may send what backward has left behind: at the same points on all ranks."""
        self._in_backward, self._passed, self._outer = True, passed, sys.exception()
        self._current, self._left = self.root, None
        self._began()
        self._need(self.root)
        self._start(self._before.get(id(self.root)))

    def _returned(self, unit: Unit, waiting: list[bool]) -> None:
        """The gradient of an output has come back; of several outputs of one call, the first one counts."""
        if waiting:
            waiting.clear()
            self._open[id(unit)] -= 1
        self._recomputed.discard(id(unit))
        if unit is self._current:
            return
        last, self._current = self._current, unit
        if is_over := last is not self.root and not self._open[id(last)]:
            self._held.discard(id(last))
        self._give_back_all(but={id(self.root), id(unit), *self._held, *self._recomputed})
        self._start(unit)
        gathers = bool(self._flying)
        self._land()
        passes = self._passed if is_over else None
        if passes and not gathers:  # read when the next block is left: ranks may be one block apart
            before, self._left = self._left, self._post(f"has left {last.words} in backward")
            self._confirm(before)
        self._start(self._before.get(id(unit)))  # its rows travel while `passes` waits and sends
        # After a note of the other ranks, which proves that they have come as far: `passes` may wait for them.
        if passes:
            passes({key for key, module in self._homes.items() if module is last.module})

    def end_backward(self) -> None:
        """Give everything back. In an `except` or a `finally`, the same as `abort`."""
        error = _raised(self._outer)
        if error is not None:
            self.abort(f"failed in backward: {headline(error)}")
            return
        self._in_backward = False
        self._recomputed.clear()
        self._held.clear()
        self._give_back_all(but=self._held)
        self._ended, self._round = self._post("ends its backward"), None

    def all_ended(self) -> None:
        """Wait until all data ranks have ended the last backward. Raises where an exception has ended one."""
        self._confirm(self._ended)

    # -- together with the other ranks

    def meet(self, said: str) -> None:
        """All data ranks come here now, or all raise: before a collective that is not ours, such as the step's."""
        self._land()
        self._meet(said)

    def abort(self, said: str = "gave up a forward or a backward") -> None:
        """Back to the state between two steps, after an exception. Waits for no other rank; tells those that wait."""
        if self._round == self._lockstep.round and not self._readers:
            self._lockstep.leave(said)
        self._clear()

    def _began(self) -> None:
        self._round = self._lockstep.round

    def _post(self, said: str) -> Posted | None:
        if self._readers:  # where everything is whole, a rank may call the model by itself
            return None
        return self._lockstep.post(MEETING, said)

    def _meet(self, said: str) -> None:
        self._confirm(self._post(said))

    def _confirm(self, posted: Posted | None) -> None:
        try:
            if posted is not None:
                self._lockstep.confirm(posted)
        except EngineError:
            self._clear()
            raise

    def _clear(self) -> None:
        """Nothing is whole but for readers, nothing is under way, and no order of blocks is expected any more."""
        self._in_forward = self._in_backward = False
        self._round, self._current, self._passed, self._left, self._ended = None, self.root, None, None, None
        self._trace, self._after, self._before = [], {}, {}
        self._held.clear()
        self._open.clear()
        self._recomputed.clear()
        self._flying = []
        for kept in self.kept.values():
            if kept.flying or (kept.users and READER not in kept.users):
                kept.shrink(lent=kept.flying)  # rows of others may still arrive in that memory
                kept.users.clear()
            kept.users &= {READER}

    # -- gathering and giving back

    def _need(self, unit: Unit) -> None:
        """Whole before anyone computes with it."""
        self._start(unit)
        self._land()

    def _land(self) -> None:
        while self._flying:
            posted, arriving = self._flying[0]
            self._confirm(posted)
            for _, handle in posted.rows:
                handle.wait()
            self._lockstep.unload(posted)
            for kept in arriving:
                kept.land()
            del self._flying[0]

    def _start(self, unit: Unit | None) -> None:
        if unit is None:
            return
        self._whole[id(unit)] = unit
        missing = [kept for kept in unit.kept if not kept.users]
        for kept in unit.kept:
            kept.users.add(id(unit))
        if not missing:
            return
        posted = self._lockstep.write(unit.number, f"gathers {unit.words} in {self._phase}", _which(missing, unit))
        self._flying.append((posted, missing))
        for kept in missing:
            kept.grow()
        lockstep = self._lockstep
        carried = lockstep.carries and missing[0].slot.owners.ranks == lockstep.group.ranks
        if not carried:
            lockstep.send(posted)
        for here in alike(missing):
            owners = here[0].slot.owners
            carry = partial(lockstep.send, posted) if carried and not posted.sent else None
            tag = lockstep.tag(posted, owners)
            rows = gather_rows([k.slot for k in here], [k.whole for k in here], owners, tag, carry)
            posted.rows.append((owners, rows))

    @property
    def _phase(self) -> str:
        return "backward" if self._in_backward else "forward" if self._in_forward else "a call of its own"

    def _give_back(self, unit: Unit) -> None:
        self._whole.pop(id(unit), None)
        for kept in unit.kept:
            self._free(kept, id(unit))

    def _give_back_all(self, but: set[int]) -> None:
        for key, unit in list(self._whole.items()):
            if key not in but:
                self._give_back(unit)

    def _free(self, kept: Kept, user: int) -> None:
        """Free the parameter's memory when its last user has finished with it."""
        if not kept.users:
            return
        kept.users.discard(user)
        if not kept.users:
            if kept.flying:
                self._land()
            kept.shrink()

    # -- everything whole

    def gather_all(self) -> None:
        """Every parameter whole, until `take_edits`."""
        self._gather_for_readers()
        self._readers += 1

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

    # -- copies of the model

    def _refuse_absent(self, what: str) -> None:
        if not self._readers:
            raise refuse_absent(what, self._where)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model has no units: it is whole and stays so."""
        self._refuse_absent("copy.deepcopy")

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse_absent("torch.save(model)")
        return type(None), ()


def _which(missing: list[Kept], unit: Unit) -> int:
    """One number for what is gathered of a unit: 0 for all of it."""
    names = ",".join(kept.slot.name for kept in missing)
    return zlib.crc32(names.encode()) if len(missing) < len(unit.kept) else 0


def _raised(outer: BaseException | None) -> BaseException | None:
    """The exception that passes through the function that asks, if it is not one that was being handled before."""
    now = sys.exception()
    if now is outer or now is None:
        return None
    if "modified by an inplace operation" in str(now):
        now.add_note(LATE_READ)
    return now


def _passed_on(tensor: Tensor, since: int) -> bool:
    """Whether a block that was called as number `since` returns what others made: the stage before, or a block whose
    call was over by then, of a tensor that was not changed in place."""
    calls, version = getattr(tensor, RETURNED, (since, None))
    return tensor.is_leaf or (calls < since and version == tensor._version)


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


def _units(model: nn.Module, blocks: Sequence[nn.Module], kept: dict[int, Kept]) -> list[Unit]:
    """The root first, with what no block holds; a parameter that several hold belongs to each of them."""
    names = {id(module): name for name, module in model.named_modules()}
    inner = [block for block in dict.fromkeys(blocks) if block is not model]
    units = [Unit(names[id(block)], number, block) for number, block in enumerate(inner, start=1)]
    for unit in units:
        unit.kept = [kept[key] for key in dict.fromkeys(id(p) for p in unit.module.parameters())]
    outside = dict.fromkeys(
        id(p) for m in _outside(model, {id(u.module) for u in units}) for p in m.parameters(recurse=False)
    )
    return [Unit("", 0, model, [kept[key] for key in outside]), *units]


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
