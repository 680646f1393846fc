"""ZeRO stage 3: parameters are row shards, and full only while a block computes with them.

A `ParamGroup` is what is gathered together: the parameters of a repeated block, or those of no block (the root).

A block is unsharded when its forward begins, and resharded when it ends; unsharded again when the gradient of its
output arrives or when it is recomputed, and resharded when the gradient of the next block's output arrives: autograd
runs operations in the reverse order of the forward, so nothing that this block saved is read after that. While one
group computes, the rows of the next one are on their way, in the order of the step before. Reductions, optimizer and
bits are those of stages 1 and 2.

A parameter that is not full keeps its shape and reads as NaN: code that computes with it outside of the model's forward
gets NaN at once, and needs `engine.full_parameters()`.

All data ranks must call the same groups in the same order: each call is a collective. gather_check.py compares what
they call, and when an exception ends a forward or a backward of one rank, it tells the others. `abort` then brings a
rank back to the state between two steps.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm.world import abort_group_on_interrupt
from isograd.core.mesh import DATA, STAGE, Mesh
from isograd.engine.packing import Packing, gather_rows, packing_of
from isograd.engine.plan import Slot, homes
from isograd.engine.zero3.deferred_init import FirstValues
from isograd.engine.zero3.gather_check import GIVES_UP, MEETING, Announcement, GatherOrderCheck
from isograd.engine.zero3.module_hooks import Hook, differentiable
from isograd.engine.zero3.sharded_param import ShardedParam, shard
from isograd.errors import EngineError, headline

Gathers = tuple[int, list[tuple[Packing, list[ShardedParam]]]]  # a number for what they bring, the same on all ranks
READERS = -1  # a user of parameters that is no group: `full_parameters`
RETURNED = "_isograd_returned"  # of a tensor that a block has returned: when (`_clock`), and its version
LATE_READ = """ZeRO 3: a backward read a parameter after its block was given back. The gradient of a block
must come back through what its forward returns, once; see 'Limits' in docs/zero.md."""


class GroupState(Enum):
    """Who has the parameters of a group, and how long."""

    SHARDED = 0  # each rank has its rows
    UNSHARDED = 1  # full for a forward or a backward, until the next block's begins
    RECOMPUTED = 2  # full for a forward that is recomputed, until its own backward begins
    KEPT = 3  # full from a forward to its backward: `keep`, the root, the last block without a pipeline


@dataclass(eq=False)
class ParamGroup:
    """What is gathered together: a block of the model, or the root."""

    name: str  # for errors
    number: int  # the same on all ranks; 0: the root
    module: nn.Module
    params: list[ShardedParam]
    own: set[int] = field(default_factory=set)  # parameters (ids) that no other group has
    state: GroupState = GroupState.SHARDED
    awaited: set[int] = field(default_factory=set)  # forwards (numbers) whose gradient has not come back yet

    def __post_init__(self) -> None:
        self.gathers = cache(self._gathers)

    def _gathers(self, *missing: ShardedParam) -> Gathers:
        """Planned once for what is missing, which is everything where no other group has a part of it."""
        alike: dict[Any, list[ShardedParam]] = {}  # of the same owners and dtype, all cut by rows or none
        for param in missing:
            slot = param.slot
            alike.setdefault((slot.owners.ranks, slot.parameter.dtype, slot.has_one_owner), []).append(param)
        names = ",".join(param.slot.name for param in missing)
        number = zlib.crc32(names.encode()) if len(missing) < len(self.params) else self.number
        return number, [(packing_of([p.slot for p in these]), these) for these in alike.values()]


@dataclass(frozen=True)
class Order:
    """Which group follows which (number), and which comes before it, as the last forward had it."""

    next: dict[int, ParamGroup] = field(default_factory=dict)
    previous: dict[int, ParamGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A forward or a backward of the model; `phase` says which ("": none, and what the last one has left)."""

    phase: str = ""
    outer: BaseException | None = None  # being handled when it began
    order: list[ParamGroup] = field(default_factory=list)  # of a forward
    expected: Order = field(default_factory=Order)
    on_block_done: Callable[[set[int]], None] | None = None  # for parameters (ids) that a backward has left behind
    current: ParamGroup | None = None  # whose backward began last; None: the root's
    epoch: int | None = None  # of the check, in which a forward or a backward began that is not over
    announced: Announcement | None = None  # when backward last left a block without a gather, or ended

    def then(self, phase: str = "", **more: Any) -> Run:
        """The next one, which is expected to have the same order."""
        return Run(phase, expected=self.expected, **more)

    @property
    def words(self) -> str:
        """For notes: ranks of which one reduces gradients and one does not are refused before they wait."""
        if self.phase == "backward":
            return "backward, which reduces" if self.on_block_done else "backward, which does not reduce"
        return self.phase or "a call of its own"

    def error(self) -> BaseException | None:
        """The exception that ends it: that passes through the function that asks, and was not there before."""
        now = sys.exception()
        if now is self.outer or now is None:
            return None
        if "modified by an inplace operation" in str(now):
            now.add_note(LATE_READ)
        return now


IDLE = Run()


class Zero3Hooks:
    """Unshards groups when the model uses them, and reshards them."""

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        mesh: Mesh,
        first: FirstValues,
        *,
        blocks: Sequence[nn.Module],
        keep: bool,
        offload: bool,
    ) -> None:
        """`slots`: of every parameter, frozen ones too. keep: full from a forward to its backward."""
        self._keep, self._where = keep, mesh.describe_rank()
        owners = {slot.owners.ranks: slot.owners for slot in slots}
        within = all(set(ranks) <= set(mesh.ranks(DATA)) for ranks in owners)  # not where experts are folded over tp
        self._check = GatherOrderCheck(mesh.group(DATA if within else STAGE), list(owners.values()), self._where)
        self._one_stage = mesh.layout.pp == 1  # a step's backward follows its forward, and begins with the last block
        self._chunks = mesh.layout.vpp > 1  # forwards take turns between blocks that are not the same ones
        self._run = IDLE
        self._clock = count()  # of calls of blocks, and of their ends
        self._pending: deque[tuple[Announcement, list[ShardedParam]]] = deque()  # gathers
        self.params = shard(slots, first, mesh, torch.device("cpu") if offload else mesh.device)
        self.groups = _groups(model, blocks, self.params)
        self.root = self.groups[0]
        self.named: Callable[[BaseException], BaseException | None] = lambda _: None  # an integration names lost ranks
        self._handles = self._hook_into(model)

    def _hook_into(self, model: nn.Module) -> list[Any]:
        handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._forward_begins, self), prepend=True),
            model.register_forward_hook(Hook(self._forward_ends, self), always_call=True),
        ]
        for group in self.groups:
            for module in [group.module] if group is not self.root else _holders_of_root(self.groups):
                begun: list[int] = []  # numbers of the calls of this module that are not over
                entering, leaving = Hook(self._entering(group, begun), self), Hook(self._leaving(group, begun), self)
                handles.append(module.register_forward_pre_hook(entering, prepend=True))
                handles.append(module.register_forward_hook(leaving, always_call=True))
        reading = Hook(lambda *_: self.refuse_absent("state_dict()"), self)
        loading = Hook(lambda *_: self.refuse_absent("load_state_dict()"), self)
        for module in (m for m in model.modules() if m is model or _has_parameters(m)):
            handles.append(module.register_state_dict_pre_hook(reading))
            handles.append(module.register_load_state_dict_pre_hook(loading))
        return handles

    def _forward_begins(self, _: nn.Module, __: Any) -> None:
        if self._run.phase == "backward":  # a recomputed forward
            return
        if self._run.phase:  # what torch does not tell hooks about: KeyboardInterrupt, for one
            self.abort("its forward was interrupted")
        run = self._run
        self._begin(run.then("forward", outer=sys.exception(), order=[self.root], announced=run.announced))
        self.unshard(run.expected.next.get(0))

    def _begin(self, run: Run) -> None:
        self._run = replace(run, epoch=self._check.epoch)
        self._need(self.root)

    def _forward_ends(self, _: nn.Module, __: Any, output: Any) -> None:
        run = self._run
        if run.phase != "forward":
            return
        error = run.error()
        if error is not None:
            self.abort(f"failed in forward: {headline(error)}")
            return
        self._run = run.then(epoch=run.epoch, announced=run.announced)
        if differentiable(output):
            self.root.state = GroupState.KEPT
            self._reshard_unused()
        else:  # an evaluation: no backward will come, whose notes are unlike those of a forward
            self._run = replace(self._run, epoch=None)
            self._reshard_unused(kept=True)
            self._confirm(self._announce("ends its forward"))
        self._remember(run.order)

    def _entering(self, group: ParamGroup, begun: list[int]) -> Callable[..., None]:
        def enter(_: nn.Module, __: Any) -> None:
            begun.append(next(self._clock))
            if self._run.phase != "forward" or group is not self.root:
                self._need(group)
            if self._run.phase == "backward" and group.state is GroupState.UNSHARDED:
                group.state = GroupState.RECOMPUTED
            if self._run.phase == "forward" and group is not self.root:
                self._run.order.append(group)
                self.unshard(self._run.expected.next.get(group.number))

        return enter

    def _leaving(self, group: ParamGroup, begun: list[int]) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            since, phase = begun.pop() if begun else next(self._clock), self._run.phase
            if group is self.root and phase:
                return
            # What an earlier block returned and this one passes on comes back through that block: freed for this one's
            # sake, it would compute its gradients with what is not there.
            graph = [tensor for tensor in differentiable(output) if not _passed_on(tensor, since)]
            call = next(self._clock)
            for tensor in graph:
                setattr(tensor, RETURNED, (call, tensor._version))
                tensor.register_hook(lambda _: self._pre_backward(group, call))
            if phase == "backward":
                return
            if graph:
                group.awaited.add(call)
            if graph and (self._keep or (self._one_stage and group is self._run.expected.previous.get(0))):
                group.state = GroupState.KEPT
            else:
                self.reshard(group)

        return leave

    def _remember(self, order: list[ParamGroup]) -> None:
        """What the next forward, and its backward, are expected to follow. Of chunks of a pipeline nobody knows which
        one comes next: each has its own order, and no first block."""
        pairs = list(pairwise(order))
        following = {a.number: b for a, b in reversed(pairs)}
        preceding = {b.number: a for a, b in pairs if a is not self.root}
        if self._chunks:
            following.pop(0, None)
            before = self._run.expected
            expected = Order(before.next | following, before.previous | preceding)
        else:
            expected = Order(following, {**preceding, 0: order[-1]})
        self._run = replace(self._run, expected=expected)

    def begin_backward(self, on_block_done: Callable[[set[int]], None] | None) -> None:
        """`on_block_done` may send what backward has left behind: at the same points on all ranks."""
        self._begin(self._run.then("backward", outer=sys.exception(), on_block_done=on_block_done))
        self.unshard(self._run.expected.previous.get(0))

    def _pre_backward(self, group: ParamGroup, call: int) -> None:
        """The gradient of an output has come back; of several outputs of one call, the first one counts."""
        group.awaited.discard(call)
        if group.state is GroupState.RECOMPUTED:
            group.state = GroupState.UNSHARDED
        last = self._run.current or self.root
        if group is last:
            return
        self._run = replace(self._run, current=group)
        is_over = last is not self.root and not last.awaited
        if is_over and last.state is GroupState.KEPT:
            last.state = GroupState.UNSHARDED
        self._reshard_unused(self.root, group)
        self.unshard(group)
        gathers = bool(self._pending)
        self.wait_for_unshard()
        done = self._run.on_block_done if is_over else None
        if done and not gathers:  # read when the next block is left: ranks may be one block apart
            before, note = self._run.announced, self._announce(f"has left {last.name} in backward")
            self._run = replace(self._run, announced=note)
            self._confirm(before)
        self.unshard(self._run.expected.previous.get(group.number))  # its rows travel while `done` waits and sends
        # After a note of the other ranks, which proves that they have come as far: `done` may wait for them.
        if done:
            done(last.own)

    def end_backward(self) -> None:
        """Reshard everything. In an `except` or a `finally`, the same as `abort`."""
        error = self._run.error()
        if error is not None:
            self.abort(f"failed in backward: {headline(error)}")
            return
        said, self._run = f"ends its {self._run.words}", self._run.then(epoch=self._run.epoch)
        self._reshard_unused(kept=True)
        self._run = self._run.then(announced=self._announce(said))

    def all_ended(self) -> None:
        """Wait until all data ranks have ended the last backward. Raises where an exception has ended one."""
        self._confirm(self._run.announced)

    def wait_for_all(self, said: str, gives_up: bool) -> None:
        """All data ranks come here now, or all raise: before a collective of the step. gives_up: this one, its step."""
        self.wait_for_unshard()
        self._confirm(self._announce(said, GIVES_UP if gives_up else MEETING))

    def abort(self, said: str = "gave up a forward or a backward") -> None:
        """Back to the state between two steps, after an exception. Waits for no other rank; tells those that wait."""
        under_way = self._run.epoch == self._check.epoch and not self._is_read
        try:
            if under_way:
                self._check.abort(said)
        finally:  # its connections may be closed: what is not there must not be taken for full
            self._clear()

    def _announce(self, said: str, number: int = MEETING) -> Announcement | None:
        """Nothing while everything is full: a rank may call the model by itself."""
        return None if self._is_read else self._check.announce(number, said)

    def _confirm(self, announcement: Announcement | None) -> None:
        if announcement is None:
            return
        try:
            self._check.confirm(announcement)
        except EngineError:
            self._clear()
            raise

    def _clear(self) -> None:
        """Nothing is full but for readers, nothing is under way, and no order of blocks is expected any more."""
        self._run = IDLE
        self._pending.clear()
        self._forget_groups()
        for param in self.params.values():
            if param.now.is_filling or (param.users and READERS not in param.users):
                param.free_full(lent=param.now.is_filling)  # rows of others may still arrive in that memory
                param.users.clear()
            param.users.intersection_update({READERS})

    def _forget_groups(self) -> None:
        for group in self.groups:
            group.state = GroupState.SHARDED
            group.awaited.clear()

    def _need(self, group: ParamGroup) -> None:
        """Full before anyone computes with it."""
        self.unshard(group)
        self.wait_for_unshard()

    @abort_group_on_interrupt()
    def unshard(self, group: ParamGroup | None) -> None:
        """Start gathering what is not there, or on its way, of a group."""
        if group is None:
            return
        if group.state is GroupState.SHARDED:
            group.state = GroupState.UNSHARDED
        missing = [param for param in group.params if not param.users]
        if missing:
            number, gathers = group.gathers(*missing)
            announcement = self._check.announce(number, f"gathers {group.name} in {self._run.words}")
            self._pending.append((announcement, missing))
        for param in group.params:
            param.users.add(group.number)
        if not missing:
            return
        for param in missing:
            param.expect()
        for packing, params in gathers:
            tag, alloc = self._check.tag(announcement, packing.owners), [p.alloc_full for p in params]
            mine, full = [p.now.mine for p in params], [p.now.full for p in params]  # it casts what is wider
            handle = gather_rows(packing, mine, full, packing.owners, tag, alloc=alloc)
            announcement.rows.append((packing.owners, handle))

    @abort_group_on_interrupt()
    def wait_for_unshard(self) -> None:
        """Wait until all that was started is full."""
        while self._pending:
            announcement, params = self._pending[0]
            self._confirm(announcement)
            for _, handle in announcement.rows:
                handle.wait()
            for param in params:
                param.filled()
            self._pending.popleft()

    def reshard(self, group: ParamGroup) -> None:
        """Free a group's parameters, but for those that another one uses."""
        group.state = GroupState.SHARDED
        for param in group.params:
            if param.users == {group.number}:
                if param.now.is_filling:
                    self.wait_for_unshard()
                param.free_full()
            param.users.discard(group.number)

    def _reshard_unused(self, *but: ParamGroup, kept: bool = False) -> None:
        for group in self.groups:
            done = group.state is not GroupState.SHARDED if kept else group.state is GroupState.UNSHARDED
            if done and group not in but:
                self.reshard(group)

    @property
    def _is_read(self) -> bool:
        """Whether everything is full, until `take_edits`."""
        return READERS in next(iter(self.params.values())).users

    def gather_all(self) -> bool:
        """Every parameter full, until `take_edits`. Whether it was not so before."""
        first = not self._is_read
        try:
            for group in self.groups:
                self.unshard(group)
            self.wait_for_unshard()
        except BaseException:
            self._clear()
            raise
        for param in self.params.values():
            param.users.add(READERS)
        return first

    @torch.no_grad()
    def take_edits(self, free: bool) -> None:
        """Keep my rows of what was edited while everything was full. `free`: where nobody reads any more, the rest."""
        for param in self.params.values():
            param.rows.copy_(param.slot.rows(param.now.full))
        for param in self.params.values() if free else ():
            param.users.clear()
            param.free_full(lent=True)

    def stepped(self) -> None:
        """The optimizer has changed rows: what is still full is out of date."""
        self.wait_for_unshard()
        self._forget_groups()
        is_read = self._is_read
        for param in self.params.values():
            if param.users:
                param.users.clear()
                param.free_full()
        if is_read:
            self.gather_all()

    def dissolve(self) -> None:
        """Leave the model full and without hooks: another engine takes it over."""
        self.gather_all()
        for handle in self._handles:
            handle.remove()

    def refuse_absent(self, what: str) -> None:
        """Raise while parameters are not full."""
        if not self._is_read:
            raise EngineError("IG574", where=self._where, use=what)


def _passed_on(tensor: Tensor, since: int) -> bool:
    """Whether a block that was called at `since` returns what others made: the stage before, or a block whose call was
    over by then, of a tensor that was not changed in place."""
    returned, version = getattr(tensor, RETURNED, (since, None))
    return tensor.is_leaf or (returned < since and version == tensor._version)


def _groups(model: nn.Module, blocks: Sequence[nn.Module], params: dict[int, ShardedParam]) -> list[ParamGroup]:
    """The root first, with what no block holds; a parameter that several hold belongs to each of them."""
    names = {id(module): name for name, module in model.named_modules()}
    inner = [block for block in dict.fromkeys(blocks) if block is not model]
    outside = (p for m in _without_blocks(model, inner) for p in m.parameters(recurse=False))
    members = [(model, outside), *((block, block.parameters()) for block in inner)]
    own = homes(blocks)
    return [
        ParamGroup(
            f"block {names[id(module)]!r}" if number else "what is outside of all blocks",
            number,
            module,
            [params[key] for key in dict.fromkeys(id(p) for p in parameters)],
            {key for key, home in own.items() if home is module},
        )
        for number, (module, parameters) in enumerate(members)
    ]


def _holders_of_root(groups: list[ParamGroup]) -> list[nn.Module]:
    """The modules that hold the root's parameters: called without the whole model, each gathers them."""
    model, *blocks = (group.module for group in groups)
    return [m for m in dict.fromkeys(_without_blocks(model, blocks)) if m is not model and _has_parameters(m)]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _without_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """A module and its children, but for blocks."""
    yield module
    for child in module.children():
        if not any(child is block for block in blocks):
            yield from _without_blocks(child, blocks)
