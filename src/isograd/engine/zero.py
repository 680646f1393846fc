"""What a ZeRO stage is: which tensors the optimizer sees, and what is gathered after the reductions.

The reduction is the same at every stage (engine/step.py): each owner has its rows of the reduced gradient. Then

    stage 0   gradients are gathered; every rank steps whole parameters
    stage 1   every rank steps its rows; parameters are gathered
    stage 2   the same moves as stage 1. Full gradients are freed as soon as they are sent at *both* stages (that costs
              nothing here), so the two differ only where a full gradient must be kept for a later backward
    stage 3   every rank steps its rows, and they are all it keeps (engine/zero3 gathers them for each block)

With fp32 parameters an optimizer's shard is `parameter.data[rows]` itself. bf16 and fp16 parameters have fp32 master
rows; the optimizer steps those, and the gather moves half precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.profiler import record_function

from isograd.comm.handle import Handle
from isograd.core.attributes import set_attributes
from isograd.core.mesh import Mesh
from isograd.engine import muon
from isograd.engine.elementwise import refuse_pieces
from isograd.engine.grad_placeholder import set_grads
from isograd.engine.muon import TensorParallelMatrices
from isograd.engine.packing import gather_rows
from isograd.engine.plan import Bucket, Plan, Slot
from isograd.engine.reducer import Reducer, zeros_of
from isograd.engine.step import StepState
from isograd.engine.zero3.param_group import Zero3Hooks
from isograd.engine.zero3.sharded_param import on_host
from isograd.errors import EngineError, headline


class Shards(list[nn.Parameter]):
    """The tensors to optimize, each a row shard of a named parameter (whole parameters at stage 0).

    Use it as the list it is, cut it into parameter groups by name with `groups`, or take `matrices` and `rest` apart.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], kept_whole: Container[str] = ()) -> None:
        pairs = list(named)
        super().__init__(shard for _, shard in pairs)
        self.names = [name for name, _ in pairs]
        self._kept_whole = kept_whole

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """(name, shard) of each."""
        return list(zip(self.names, self, strict=True))

    @property
    def matrices(self) -> Shards:
        """The matrices that Engine(matrices=[...]) names: all of each on its owner, no row of it elsewhere."""
        return Shards(pair for pair in self.named() if pair[0] in self._kept_whole)

    @property
    def rest(self) -> Shards:
        """Everything else."""
        return Shards(pair for pair in self.named() if pair[0] not in self._kept_whole)

    def groups(self, patterns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Optimizer groups: each shard goes to the first shell-style pattern that its name matches.

        lambda ps: AdamW(ps.groups({"*norm*": {"weight_decay": 0.0}, "*": {}}), lr=3e-4)
        """
        found: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in patterns}
        lost = []
        for name, shard in self.named():
            home = next((p for p in patterns if fnmatchcase(name, p)), None)
            if home is None:
                lost.append(name)
            else:
                found[home].append(shard)
        empty = [pattern for pattern, shards in found.items() if not shards]
        if lost or empty:
            raise EngineError("IG505", empty=empty, lost=lost, names=self.names)
        return [{"params": found[pattern], **options} for pattern, options in patterns.items()]


def _plain(value: object) -> object:
    """A number, a word or several; None for what has no value that can be compared without waiting for a device."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str) else None


def _settings(group: Mapping[str, Any]) -> str:
    return repr({name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")})


def _take(targets: Sequence[Tensor], masters: Sequence[nn.Parameter]) -> None:
    """Of half-precision tensors and their masters, which lie in one place: what was edited."""
    if masters[0].device.type == "cpu":
        for rows, master in zip(targets, masters, strict=True):
            edited, written = rows.to(master.device), master.to(rows.dtype)
            if not torch.equal(edited, written):
                torch.where(edited == written, master, edited.to(master.dtype), out=master.data)
        return
    sizes = [master.numel() for master in masters]  # side by side: on a card each call is a launch
    edited, written = targets[0].new_empty(2, sum(sizes))
    for flat, tensors in ((edited, targets), (written, masters)):
        places = zip(flat.split(sizes), tensors, strict=True)
        torch._foreach_copy_([place.view(tensor.shape) for place, tensor in places], list(tensors))
    same, wide = (edited == written).split(sizes), edited.to(masters[0].dtype).split(sizes)
    for master, kept, other in zip(masters, same, wide, strict=True):
        torch.where(kept.view(master.shape), master, other.view(master.shape), out=master.data)


Factory = Callable[[Shards], torch.optim.Optimizer]
KINDS = 8  # of parameter groups that stages of a pipeline compare at most
PART = "isograd_part"  # of a state_dict: whose part of the optimizer's state it is
GATHERS_AT_ONCE = 3  # buckets whose rows are under way to all ranks
DIVIDES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # whose fused steps take `grad_scale`, `found_inf`
SCALES = 2.0**-100, 2.0**100  # between which the reciprocal is a usual number of fp32


@dataclass(frozen=True)
class Verdict:
    """Whether a step is taken, computed on the card; no host has looked at it (engine/decision.py)."""

    refused: Tensor  # fp32: 1 where the optimizer must do nothing
    divisor: Tensor  # fp32: of gradients
    grad_norm: Tensor  # fp64: of the mean gradient, before clipping


class ShardedOptimizer:
    """The optimizer, its shards, and the way of their results back into the model."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        factory: Factory,
        zero3: Zero3Hooks | None,
        offload: bool,
        across: TensorParallelMatrices,
        elementwise: bool,
    ) -> None:
        """offload: masters and the optimizer's state lie, and step, in the host's memory. across: the matrices that
        tp cuts and that are stepped uncut. elementwise: the user says so of an optimizer that is not torch's."""
        stage = mesh.layout.zero
        self.plan, self.stage, self.zero3, self.offload, self.across = plan, stage, zero3, offload, across
        self.masters = {slot.name: self._master(slot) for slot in plan.slots}
        pairs = [(slot, self.masters[slot.name], self._target(slot)) for slot in plan.slots if slot not in across]
        # Masters with memory of their own: wider than the parameter, or on the host.
        self._separate_masters = {s: m for s, m, rows in pairs if (m.dtype, m.device) != (rows.dtype, rows.device)}
        self._free_rows()
        self._collect_edits()
        shards = Shards(self.masters.items(), {slot.name for slot in plan.slots if slot.uncut_matrix})
        self.optimizer = factory(shards)
        for one in muon.members(self.optimizer):
            if hasattr(one, "train"):  # schedule-free ones begin as if evaluated (ema.py)
                one.train()
        if (wrong := self._badly_owned()) is not None:
            raise wrong
        slots = {id(self.masters[slot.name]): slot for slot in plan.slots}
        refuse_pieces(self.optimizer, slots, by_rows=stage > 0, elementwise=elementwise)
        self._stepping = False
        self._by_rows = stage > 0 and any(slot.cut_by_rows for slot in plan.slots)
        self._in_fp32 = all(slot.dtype == torch.float32 for slot in plan.slots)
        self._members = dict.fromkeys([self.optimizer, *muon.members(self.optimizer)])
        for one in self._members:
            one.register_step_pre_hook(self._refuse_by_hand)
        self.know_groups()
        self._part = self._part_of(mesh)
        self.optimizer.register_state_dict_post_hook(self._mark_state)
        self.optimizer.register_load_state_dict_pre_hook(self._refuse_state)

    def _part_of(self, mesh: Mesh) -> tuple[int, str]:
        """Of the optimizer's state, what this rank has: a digest, 0 where that is all of it, and in words."""
        owned = [(self.masters[slot.name].shape, slot.owner if self.stage else 0) for slot in self.plan.slots]
        parts = mesh.index("pp"), owned, [slot.contract.local(mesh) for slot in self.plan.slots]
        cut = any(s.contract.shards or (self.stage and s.owners.size > 1) for s in self.plan.slots)
        digest = crc32(repr(parts).encode()) if cut or mesh.size("pp") > 1 else 0
        return digest, f"{mesh.describe_rank()} under {str(mesh.layout)!r}"

    def _mark_state(self, _: object, state: dict[str, Any]) -> None:
        if self._part[0]:
            state[PART] = self._part

    def _refuse_state(self, _: object, state: dict[str, Any]) -> None:
        """Before anything is loaded: another rank's part, perhaps of equal shapes, or a state of whole parameters."""
        saved, seen = state.get(PART, self._part), ""
        if saved[0] != self._part[0]:
            seen = f"that of {saved[1]}"
        elif self._part[0] and PART not in state:
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            mine = [p.shape for group in self.optimizer.param_groups for p in group["params"]]
            for number, shape in zip(numbers, mine, strict=False):
                for name, value in state["state"].get(number, {}).items():
                    if isinstance(value, Tensor) and value.dim() == len(shape) > 0 and value.shape != shape:
                        seen = seen or f"{name} {list(value.shape)} for {list(shape)}, of parameter {number}"
        if seen:
            raise EngineError("IG585", seen=seen, where=self._part[1])

    def problem(self, mesh: Mesh) -> EngineError | None:
        """The error if a hook of the program's would take rows for whole gradients, or a group was added."""
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self.masters):
            return self._badly_owned()
        if not self._by_rows or all(len(one._optimizer_step_pre_hooks) == 1 for one in self._members):
            return None
        return EngineError("IG546", where=mesh.describe_rank())

    def _refuse_by_hand(self, *_: object) -> None:
        """Gradients are the engine's until its step: called alone, the optimizer would step with none."""
        if not self._stepping:
            raise EngineError("IG556", seen="engine.optimizer.step()")

    def _master(self, slot: Slot) -> nn.Parameter:
        if slot in self.across:  # NaN until it is collected: equal to nothing that could be in the parameter
            shape = slot.contract.shape if self.across.is_home(slot) else (0, *slot.contract.shape[1:])
            device = torch.device("cpu") if self.offload else slot.parameter.device
            return nn.Parameter(torch.full(shape, torch.nan, dtype=slot.dtype, device=device))
        if self.stage == 0 and slot.parameter.dtype == slot.dtype:
            return slot.parameter
        rows = self._target(slot)
        rows = on_host(rows) if self.offload else rows
        return nn.Parameter(rows if rows.dtype == slot.dtype else rows.to(slot.dtype, copy=True))

    def _target(self, slot: Slot) -> Tensor:
        """What a step changes, in the parameter's own dtype."""
        if self.zero3 is not None:
            return self.zero3.params[id(slot.parameter)].rows
        return slot.parameter.data if self.stage == 0 else slot.rows(slot.parameter.data)

    def _badly_owned(self) -> EngineError | None:
        """The error unless every trainable parameter belongs to exactly one parameter group, and nothing else does."""
        names = {id(shard): name for name, shard in self.masters.items()}
        owned = [id(p) for g in getattr(self.optimizer, "param_groups", ()) for p in g["params"]]
        missing = [name for key, name in names.items() if key not in owned]
        twice = [names[key] for key in set(owned) if owned.count(key) > 1 and key in names]
        foreign = sum(key not in names for key in owned)
        if missing or twice or foreign:
            return EngineError("IG504", missing=missing, twice=twice, foreign=foreign)
        return None

    def step(
        self, step_state: StepState, scale: float, unused: set[str], verdict: Verdict | None = None
    ) -> BaseException | None:
        """Optimizer step on `final_shards * scale`; parameters that no rank used have no gradient, as on one device.
        verdict: decides instead of the caller, and has the scale.

        Returns what the optimizer raised: the other ranks wait for this one's rows all the same."""
        try:
            return self._step(step_state, scale, unused, verdict)
        except BaseException as error:  # between two messages: nothing says which parameters have changed
            step_state.mark_inconsistent(headline(error))
            raise

    def _step(
        self, step_state: StepState, scale: float, unused: set[str], verdict: Verdict | None
    ) -> BaseException | None:
        if self.zero3 is None:  # at stage 3 parameters are there to edit in `full_parameters` only, which takes edits
            self.take_edits()
        divides = verdict is not None or self._divides(scale)
        if self.stage == 0:
            gather_gradients(step_state, dict.fromkeys(self.plan.slots, None if divides else scale))
        elif not divides:
            torch._foreach_mul_(list(step_state.now.final_shards.values()), scale)
        gradients: Mapping[Slot, Tensor] = step_state.now.full if self.stage == 0 else step_state.now.final_shards
        self._collect_edits()
        collected = self.across.collect({
            slot: gradients[slot] if slot in gradients else torch.zeros_like(self._target(slot), dtype=slot.dtype)
            for slot in self.across.slots
            if slot.name not in unused
        })  # fmt: skip
        for slot in self.plan.slots:
            gradient = (collected if slot in self.across else gradients).get(slot)
            master = self.masters[slot.name]
            here = gradient is not None and gradient.numel() and slot.name not in unused
            set_grads([(master, gradient.to(master.device) if gradient is not None and here else None)])
        step_state.change(writes=step_state.now.writes + 1)
        numbers: dict[str, Tensor | None] = {}
        if verdict is not None:
            numbers = {"grad_scale": verdict.divisor, "found_inf": verdict.refused}
        elif divides:
            home = next(iter(self.masters.values())).device
            numbers = {"grad_scale": torch.full((), 1.0 / scale, device=home)}
        raised: BaseException | None = None
        try:
            with set_attributes(self, _stepping=True), set_attributes(*muon.members(self.optimizer), **numbers):
                self.optimizer.step()
        except BaseException as error:
            raised = error
        set_grads((master, None) for master in self.masters.values())
        self._write_back(step_state.reducer)
        return raised

    def _divides(self, scale: float) -> bool:
        """Whether the optimizer can divide gradients in the pass that steps them, by the number that torch's own
        scaler of gradients gives it: a fused one, in fp32 (the number is of fp32), whose gradients nobody looks at
        before that."""
        usual = self._in_fp32 and SCALES[0] < scale < SCALES[1]
        return usual and not _global_optimizer_pre_hooks and all(map(_divides, muon.members(self.optimizer)))

    def takes_verdicts(self) -> bool:
        """Whether a step can be refused on the card, and then leaves everything as it was."""
        hooks = [_global_optimizer_post_hooks, *(one._optimizer_step_post_hooks for one in self._members)]
        moves = self.offload or bool(self.across.slots) or any(hooks)
        return not moves and self._divides(1.0) and all(map(_has_state, muon.members(self.optimizer)))

    def know_groups(self) -> None:
        """Stages of a pipeline have other parameters, and perhaps other groups: those that are set alike now, at the
        start or behind a checkpoint, must be set alike in every step."""
        self._kinds = [crc32(_settings(group).encode()) for group in self.optimizer.param_groups]

    def settings(self, mesh: Mesh, *more: object) -> tuple[int, dict[str, Tensor]]:
        """A digest of the numbers that each parameter group is set to, and of `more`, which all ranks of a stage have
        in common. Under pp also columns of (kind, digest) for groups of each kind, and for `more`; 0: no such kind."""
        groups, shared = [_settings(group) for group in self.optimizer.param_groups], [*map(_plain, more)]
        whole = crc32(repr((groups, *shared)).encode())
        if mesh.size("pp") == 1:
            return whole, {}
        now: dict[int, set[str]] = {1: {repr(shared)}}
        for kind, group in zip(self._kinds, groups, strict=False):
            now.setdefault(kind, set()).add(group)
        pairs = [number for kind in sorted(now) for number in (kind, crc32(repr(sorted(now[kind])).encode()))]
        return whole, {"kinds": torch.tensor([*pairs, *[0] * 2 * KINDS][: 2 * KINDS], dtype=torch.float64)}

    @torch.no_grad()
    def take_edits(self) -> None:
        """Bring what was edited in half-precision parameters into their masters, and leave the rest of those alone.

        Contents are compared, because an edit of `.data` moves no version counter. On the CPU the masters are read and
        left when nothing was edited; on a GPU, which nothing waits for here, each element is chosen.
        """
        for bucket in self.plan.buckets:
            if slots := [slot for slot in bucket.slots if slot in self._separate_masters]:
                _take([self._target(slot) for slot in slots], [self._separate_masters[slot] for slot in slots])
        self._free_rows()

    def _free_rows(self) -> bool:
        """ZeRO 3: half-precision rows are made of their masters as they are gathered. Whether it is so here."""
        if self.zero3 is None or self.offload:
            return False
        for slot, master in self._separate_masters.items():
            self.zero3.params[id(slot.parameter)].free_rows(master)
        return True

    @torch.no_grad()
    def _collect_edits(self) -> None:
        """The same for matrices that are stepped whole and of which tp ranks have parts."""
        wholes = self.across.collect({slot: self._target(slot) for slot in self.across.slots})
        for slot, edited in wholes.items():
            _take([edited], [self.masters[slot.name]])

    def moved(self, step_state: StepState) -> None:
        """The masters have new values without a step."""
        step_state.change(writes=step_state.now.writes + 1)
        self._write_back(step_state.reducer)

    @torch.no_grad()
    def _write_back(self, reducer: Reducer) -> None:
        if not self._free_rows() and self._separate_masters:
            masters: list[Tensor] = list(self._separate_masters.values())
            torch._foreach_copy_([self._target(slot) for slot in self._separate_masters], masters)
        wholes = {slot: self.masters[slot.name].data for slot in self.across.slots if self.across.is_home(slot)}
        self.across.spread(wholes, {slot: self._target(slot) for slot in self.across.slots})
        if 0 < self.stage < 3:
            pairs = [(b, [(s.rows(s.parameter.data), s.parameter.data) for s in b.slots]) for b in self.plan.buckets]
            with record_function("isograd: gather parameters"):
                _gather(reducer, pairs)
        if self.zero3 is not None:
            self.zero3.stepped()


def _divides(one: torch.optim.Optimizer) -> bool:
    step = vars(one).get("step")  # somebody's own; schedules of rates put theirs there, which only counts
    return (
        type(one) in DIVIDES
        and all(group.get("fused") for group in one.param_groups)
        and len(one._optimizer_step_pre_hooks) == 1  # the engine's
        and (step is None or getattr(step, "_wrapped_by_lr_sched", False))
    )


def _has_state(one: torch.optim.Optimizer) -> bool:
    """Whether a step adds no entry to the optimizer's state."""
    stepped = [p for g in one.param_groups if g.get("momentum") != 0 for p in g["params"] if p.numel()]
    return all(p in one.state for p in stepped)


@torch.no_grad()
def gather_gradients(step_state: StepState, scales: Mapping[Slot, float | None]) -> None:
    """My rows, scaled (None: as they are), and everybody's, into the whole gradient."""
    work, full = [], step_state.now.full
    for bucket in step_state.plan.buckets:
        pairs = []
        for slot in bucket.slots:
            if slot not in full:
                full[slot] = zeros_of(slot)
            whole, mine, scale = full[slot], step_state.now.final_shards.get(slot), scales.get(slot)
            rows = slot.rows(whole)
            if mine is not None and scale is not None:
                torch.mul(mine, scale, out=rows)
            elif mine is not None and bucket.owners.size > 1:
                rows = mine  # the gather brings them to their place
            elif mine is not None and rows.data_ptr() != mine.data_ptr():
                rows.copy_(mine)
            pairs.append((rows, whole))
        work.append((bucket, pairs))
    _gather(step_state.reducer, work)


def _gather(reducer: Reducer, work: Iterable[tuple[Bucket, Sequence[tuple[Tensor, Tensor]]]]) -> None:
    """My rows of each bucket's slots, and everybody's, into whole tensors."""
    under_way: deque[Handle] = deque()
    for bucket, pairs in work:
        if bucket.owners.size > 1:
            if len(under_way) == GATHERS_AT_ONCE:
                under_way.popleft().wait()
            rows, wholes = zip(*pairs, strict=True)
            packing, buffers = reducer.packings[bucket], reducer.buffers
            under_way.append(gather_rows(packing, rows, wholes, bucket.owners, buffers=buffers))
    for handle in under_way:
        handle.wait()
