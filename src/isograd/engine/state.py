"""What a rank keeps between steps, and which rank writes each value: what checkpoints save and load.

Every value is of one of four kinds, and its kind alone says who writes it and who holds it after a load:

per element    a tensor shaped like its parameter: the parameter itself ("model/NAME"), the fp32 rows of a
               half-precision one ("master/NAME"), the average of its values over steps ("ema/NAME"), an entry of the
               optimizer's state ("optimizer/exp_avg/NAME").
               It is cut into rows as its parameter is, and each row is written by the rank that owns it
               (`slot.cuts`, the same at every ZeRO stage), on the replica that stands for the others
               (`contract.is_primary_replica`). Persistent buffers ("buffer/NAME") are written by the first data rank.
per parameter  one number for a whole parameter, such as Adam's step count. The rank that owns the parameter's first
               element writes it. After a load every rank that owns rows of the parameter holds it, and no other rank
               does: a rank without rows never steps the parameter, so its number would stand still.
per run        hyperparameters of the optimizer's groups, its counters, the loss scale. Equal on all ranks, which is
               checked at every save.
per rank       the state of torch's default generators ("generator/cpu/00003"). Loaded under the same layout only.

`declare` finds the kind of each entry of the optimizer's state, once for all its parameters and all ranks. An entry
that has none of these kinds is refused there, on all ranks, by name (IG540).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isograd.comm.consensus import all_gather_object
from isograd.core.contract_table import contracts
from isograd.core.mesh import DATA, Mesh
from isograd.core.rng import random_state
from isograd.engine.elementwise import is_whole
from isograd.engine.ema import average_of
from isograd.engine.muon import members
from isograd.engine.plan import Slot, slot_of
from isograd.engine.step_status import Status
from isograd.errors import EngineError

if TYPE_CHECKING:
    from isograd.engine.engine import Engine

Box = tuple[tuple[int, int], ...]
Memory = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: its dtype and its global shape

# Options that say how an optimizer computes on this machine; they are not saved.
HOW = ("fused", "foreach", "capturable", "differentiable")
ELEMENT, PARAMETER, WHOLE = "per element", "per parameter", "per whole parameter"
SHOWN = 8  # names in an error


@dataclass(frozen=True)
class Part:
    """A box of a global tensor, and the memory that holds it here. A number is a tensor of one row."""

    key: str
    shape: tuple[int, ...]  # global
    box: Box
    tensor: Tensor
    writes: tuple[int, int]  # the rows of `tensor` that this rank writes; (0, 0): another rank does

    @property
    def written(self) -> tuple[Box, Tensor]:
        """The box and the memory that this rank writes."""
        start, stop = self.writes
        first = self.box[0][0]
        return ((first + start, first + stop), *self.box[1:]), self.tensor[start:stop]


def parts(engine: Engine, entries: Mapping[str, Iterable[str]] | None = None) -> list[Part]:
    """Every tensor that this rank keeps: whole parameters of its tensor-parallel part, or rows of them at ZeRO 3.

    entries: {parameter: names of the optimizer's entries that are per element}; None leaves the optimizer out.
    """
    slots = {slot.name: slot for slot in engine.plan.slots}
    states = {name: _state(member, master) for member, _, name, master in _stepped(engine)}
    found, average = [], average_of(engine)
    for record in engine.table:
        slot = slots.get(record.name) or slot_of(record, engine.mesh)
        found.append(_part(f"model/{record.name}", slot, engine.local_shard(record.name), engine.mesh))
        master = engine._sharded_optimizer.masters.get(record.name)
        if master is None:
            continue
        part = _matrix if slot in engine._sharded_optimizer.across else _part
        if master.dtype != record.parameter.dtype:
            found.append(part(f"master/{record.name}", slot, master.data, engine.mesh))
        if average is not None:
            found.append(part(f"ema/{record.name}", slot, average.rows[record.name], engine.mesh))
        for entry in (entries or {}).get(record.name, ()):
            key, kept = f"optimizer/{entry}/{record.name}", states[record.name][entry]
            if kept.shape == master.shape:
                found.append(part(key, slot, kept, engine.mesh))
            else:
                found.append(_uncut(key, kept, _writes_numbers(engine, slot, master)))
    first = engine.mesh.index(DATA) == 0 and engine.mesh.index("tp") == 0
    for name, buffer in _saved_buffers(engine.model):
        found.append(_uncut(f"buffer/{name}", buffer, first))
    return [part for part in found if math.prod(part.shape)]


def parts_of_model(model: nn.Module, mesh: Mesh) -> list[Part]:
    """The parameters of a model that no engine holds."""
    return [_part(f"model/{r.name}", slot_of(r, mesh), r.parameter.data, mesh) for r in contracts(model, mesh)]


def _part(key: str, slot: Slot, tensor: Tensor, mesh: Mesh) -> Part:
    """`tensor` is this rank's whole part of the parameter, or its rows of it."""
    whole = list(slot.contract.local(mesh)) or [(0, 1)]
    tensor = tensor.view(1) if tensor.dim() == 0 else tensor
    start, stop = slot.cuts[slot.owner : slot.owner + 2]
    first, last = whole[0]
    if len(tensor) != last - first:
        whole[0] = (first + start, first + stop)
        start, stop = 0, stop - start
    writes = (start, stop) if slot.contract.is_primary_replica(mesh) else (0, 0)
    return Part(key, slot.contract.shape, tuple(whole), tensor, writes)


def _matrix(key: str, slot: Slot, tensor: Tensor, mesh: Mesh) -> Part:
    """Of a matrix that tp cuts and that one rank steps whole: `tensor` is all of it there, and empty elsewhere."""
    rows = len(tensor) if slot.cuts[slot.owner] < slot.cuts[slot.owner + 1] else 0  # at stage 0 all data ranks have it
    box = ((0, len(tensor)), *((0, size) for size in slot.contract.shape[1:]))
    return Part(key, slot.contract.shape, box, tensor, (0, rows))


def _uncut(key: str, tensor: Tensor, writes: bool) -> Part:
    """A buffer, or what an optimizer keeps, in a shape of its own, of a parameter that it steps whole."""
    rows = tensor.view(1) if tensor.dim() == 0 else tensor
    box = tuple((0, size) for size in rows.shape)
    return Part(key, tuple(tensor.shape), box, rows, (0, len(rows) if writes else 0))


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict has, under the same names; one that two modules share is listed once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(prefix, recurse=False):
            if leaf.rpartition(".")[2] not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield leaf, buffer


def not_finite(found: Iterable[Part], counts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What has NaN or Inf, of the tensors and numbers that this rank writes; buffers may, such as a mask's infinities.

    One pass, one synchronisation. Squares may overflow; the largest value takes 17 times as long on CPUs.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for part in found:
        tensor = part.written[1]
        if tensor.numel() and tensor.is_floating_point() and not part.key.startswith("buffer/"):
            by_device.setdefault(tensor.device, []).append((part.key, tensor))
    wrong = [
        f"optimizer/{entry}/{name}"
        for entry, values in counts.items()
        for name, (value, _) in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    for pairs in by_device.values():
        norms = torch.stack([norm.double() for norm in torch._foreach_norm([t for _, t in pairs])]).isfinite().tolist()
        wrong += [key for (key, t), finite in zip(pairs, norms, strict=True) if not (finite or t.isfinite().all())]
    return wrong


@dataclass(frozen=True)
class Declared:
    """How each entry of the optimizer's state is kept. Equal on all ranks."""

    entries: dict[str, str]  # {"AdamW.exp_avg": ELEMENT, "AdamW.step": PARAMETER}
    run: dict[str, Any]  # what is kept per run, as JSON: "groups", "counters", "loss_scale"


def _stepped(engine: Engine) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], str, nn.Parameter]]:
    """(optimizer, group, name of the parameter, what is stepped of that parameter on this rank)."""
    names = {id(master): name for name, master in engine._sharded_optimizer.masters.items()}
    for member in members(engine.optimizer):
        for group in member.param_groups:
            for master in group["params"]:
                yield member, group, names[id(master)], master


def _state(member: torch.optim.Optimizer, master: nn.Parameter) -> dict[str, Any]:
    """A parameter's state without entries that are None. (`state[master]` would make one: it is a defaultdict.)"""
    return {entry: value for entry, value in member.state.get(master, {}).items() if value is not None}


def _named(member: torch.optim.Optimizer, entry: str) -> str:
    return f"{type(member).__name__}.{entry}"


def kinds(engine: Engine) -> dict[str, str]:
    """{parameter: class of the optimizer that steps it}."""
    return {name: type(member).__name__ for member, _, name, _ in _stepped(engine)}


def declare(engine: Engine) -> Declared:
    """Find the kind of each entry. All ranks call it, and all raise when one of them has a value of no kind."""
    mesh = engine.mesh
    evidence: dict[str, dict[str, str]] = {}  # {entry: {kind: a parameter for which it is of that kind}}
    refused: list[str] = []
    for entry, name, kind in _entries(engine, refused):
        evidence.setdefault(entry, {}).setdefault(kind, name)
    run = _per_run(engine, refused)
    notes = all_gather_object([evidence, refused[:SHOWN]], mesh)
    refused = [line for _, lines in notes for line in lines]
    entries = {}
    for entry in sorted({entry for said, _ in notes for entry in said}):
        kinds = {kind: name for said, _ in notes for kind, name in said.get(entry, {}).items()}
        certain = sorted(kind for kind in kinds if not kind.endswith("?"))
        if len(certain) > 1 and WHOLE not in certain:
            refused.append(f"{entry}: " + " and ".join(f"{kind} for {kinds[kind]!r}" for kind in certain))
        # What is kept of a whole parameter of one row may have the parameter's shape, or be one number.
        entries[entry] = WHOLE if WHOLE in certain else (certain or sorted(kinds))[0].removesuffix("?")
    _refuse_kindless(refused)
    _refuse_unequal(run, mesh)
    return Declared(entries, run | {"groups": _merged(all_gather_object(run["groups"], mesh, "pp"))})


def renew(engine: Engine, before: Declared) -> Declared:
    """What `declare` would say now, without a message: kinds as they were declared, and this stage's numbers per run.
    An entry that is new since then has the kind that this rank sees."""
    entries, refused = dict(before.entries), list[str]()
    for entry, _, kind in _entries(engine, refused):
        entries.setdefault(entry, kind.removesuffix("?"))
    run = _per_run(engine, refused)
    _refuse_kindless(refused)
    return Declared(entries, run)


def merge_runs(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The numbers per run of all stages, from those that `renew` gave on each of the ranks, in rank order."""
    found = list(runs)
    return found[0] | {"groups": _merged([run["groups"] for run in found])}


def _refuse_kindless(refused: list[str]) -> None:
    if refused:
        raise EngineError(
            "IG540",
            "the optimizer keeps values that cannot be cut into rows, neither in memory nor in a checkpoint",
            seen="; ".join(list(dict.fromkeys(refused))[:SHOWN]),
            expected="for a parameter, tensors of its shape (any, if stepped whole) and numbers; of a group, words too",
            fix="take an elementwise optimizer (AdamW, SGD, ...), or Muon: Engine(..., matrices=[...])",
        )


def _entries(engine: Engine, refused: list[str]) -> Iterator[tuple[str, str, str]]:
    """(entry, parameter, kind) of each value of the optimizer's state; what has no kind goes to `refused`."""
    slots, by_rows = {slot.name: slot for slot in engine.plan.slots}, engine.mesh.layout.zero > 0
    for member, _, name, master in _stepped(engine):
        for entry, value in _state(member, master).items():
            kind = _kind(entry, value, master, is_whole(slots[name], by_rows))
            if kind is None:
                refused.append(f"{entry!r} of {name!r}: {_words(value)}")
            else:
                yield _named(member, entry), name, kind


def _kind(entry: str, value: object, master: Tensor, whole: bool) -> str | None:
    """ELEMENT, PARAMETER or WHOLE, with a question mark where a parameter of one element leaves it open; None: none."""
    if not isinstance(value, Tensor):
        return PARAMETER if isinstance(value, bool | int | float | str) else None
    if value.shape == master.shape and value.numel() == 1:
        return f"{ELEMENT}?" if value.is_floating_point() and entry != "step" else f"{PARAMETER}?"
    if value.shape == master.shape:
        return ELEMENT
    return PARAMETER if value.numel() == 1 else WHOLE if whole else None


def _words(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def elementwise(engine: Engine, declared: Declared) -> dict[str, list[str]]:
    """{parameter: entries that are tensors}: what `parts` asks for."""
    return {
        name: [entry for entry in _state(member, master) if declared.entries[_named(member, entry)] != PARAMETER]
        for member, _, name, master in _stepped(engine)
    }


def counts(engine: Engine, declared: Declared, *, every: bool = False) -> dict[str, dict[str, Any]]:
    """{entry: {parameter: [value, dtype or None]}}: numbers that this rank writes; all it has (`every`)."""
    slots = {slot.name: slot for slot in engine.plan.slots}
    found: dict[str, dict[str, Any]] = {}
    for member, _, name, master in _stepped(engine):
        if not every and not _writes_numbers(engine, slots[name], master):
            continue
        for entry, value in _state(member, master).items():
            if declared.entries[_named(member, entry)] == PARAMETER:
                dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else None
                found.setdefault(entry, {})[name] = [_plain(value), dtype]
    return found


def _writes_numbers(engine: Engine, slot: Slot, master: Tensor) -> bool:
    """Whether this rank writes what is kept once: it owns the first element of the first replica, or all."""
    mesh = engine.mesh
    if slot in engine._sharded_optimizer.across:
        return bool(_matrix("", slot, master, mesh).writes[1])
    owns_row = slot.cuts[slot.owner] == 0 < slot.cuts[slot.owner + 1]
    replica = owns_row and slot.contract.is_primary_replica(mesh)
    return replica and not any(start for start, _ in slot.contract.local(mesh))


def make_room(engine: Engine, saved: Mapping[str, Mapping[str, Memory]]) -> dict[str, list[str]]:
    """Replace the optimizer's state by memory for {parameter: {entry: (dtype, shape)}}. Memory that fits is kept.

    Returns the entries that this rank now holds: none of a parameter whose rows are all on other ranks.
    """
    held: dict[str, list[str]] = {}
    shapes = {slot.name: tuple(slot.contract.shape) for slot in engine.plan.slots}
    for member, _, name, master in _stepped(engine):
        before = member.state.pop(master, {})
        for entry, (dtype, shape) in saved.get(name, {}).items() if master.numel() else ():
            old, size = before.get(entry), master.shape if shape == shapes[name] else shape
            fits = isinstance(old, Tensor) and old.shape == size and old.dtype == dtype
            member.state[master][entry] = old if fits else torch.zeros(size, dtype=dtype, device=master.device)
            held.setdefault(name, []).append(entry)
    return held


def take_numbers(engine: Engine, saved: Mapping[str, Any]) -> None:
    """After `make_room`: numbers per parameter, to the ranks that own rows of it; numbers per run, to all."""
    for member, group, name, master in _stepped(engine):
        on_device = group.get("fused") or group.get("capturable")
        device = master.device if on_device else torch.device("cpu")
        for entry, counted in saved["counts"].items():
            if name in counted and master.numel():
                value, dtype = counted[name]
                if dtype is not None:
                    value = torch.tensor(value, dtype=getattr(torch, dtype), device=device)
                member.state[master][entry] = value
    options = {name: group["options"] for group in saved["groups"] for name in group["names"]}
    names = {id(master): name for name, master in engine._sharded_optimizer.masters.items()}
    for member in members(engine.optimizer):
        member.state.update(saved.get("counters", {}))
        for group in member.param_groups:
            own = options[names[id(group["params"][0])]] if group["params"] else {}
            for key, value in own.items():
                group[key] = _like(group.get(key), value)
    engine._sharded_optimizer.know_groups()
    if engine.loss_scale and saved["loss_scale"]:
        engine.step_state.change(loss_scale=replace(engine.loss_scale, **saved["loss_scale"]))


def _like(before: Any, value: Any) -> Any:
    """JSON has no tuples, and a learning rate may be a tensor that a captured graph reads."""
    if isinstance(before, Tensor):
        return before.fill_(value)
    return tuple(value) if isinstance(before, tuple) else value


def _per_run(engine: Engine, refused: list[str]) -> dict[str, Any]:
    """Hyperparameters of the groups, counters of the optimizer, the loss scale; what is no number is refused."""
    groups: list[dict[str, Any]] = []
    counters: dict[str, Any] = {}
    names = {id(master): name for name, master in engine._sharded_optimizer.masters.items()}
    for member in members(engine.optimizer):
        kind = type(member).__name__
        for group in member.param_groups:
            kept = {key: value for key, value in group.items() if key not in ("params", *HOW) and not callable(value)}
            refused += [f"{kind}'s group option {key!r}: {_words(v)}" for key, v in kept.items() if not _is_plain(v)]
            options = {key: _plain(value) for key, value in kept.items() if _is_plain(value)}
            groups.append({"kind": kind, "options": options, "names": [names[id(p)] for p in group["params"]]})
        for key, value in member.state.items():
            if not isinstance(key, Tensor):  # torch's optimizers have none; it is what a user's own counts by
                if isinstance(key, str) and _is_plain(value):
                    counters[key] = _plain(value)
                else:
                    refused.append(f"{kind}'s state {key!r}: {_words(value)}")
    scale = engine.loss_scale
    kept_scale = {"value": scale.value, "good_steps": scale.good_steps} if scale else None
    return {"groups": groups, "counters": counters, "loss_scale": kept_scale}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    one_number = isinstance(value, Tensor) and value.numel() == 1
    return value is None or one_number or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    """As JSON. A tensor keeps its dimensions: () is a number, (1,) a list of one."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _refuse_unequal(run: dict[str, Any], mesh: Mesh) -> None:
    """All ranks of a pipeline stage keep the same numbers per run; the stages have groups of their own."""
    stage = mesh.index("pp")
    said = all_gather_object([stage, sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()], mesh)
    firsts: dict[int, int] = {}
    for rank, (its_stage, digest) in enumerate(said):
        first = firsts.setdefault(its_stage, rank)
        if said[first][1] != digest:
            break
    else:
        return
    runs = all_gather_object(run, mesh)
    raise EngineError(
        "IG540",
        "the optimizer keeps numbers that differ between ranks, and a checkpoint has one of each",
        seen=f"rank {first} and rank {rank}: {_difference(runs[first], runs[rank])}",
        expected="equal hyperparameters and counters on all ranks",
        fix="an optimizer that computes a number from all its elements (Prodigy, LARS, ...) needs ZeRO 0",
    )


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first option or counter in which they differ."""
    pairs = [(one["counters"], other["counters"]), (one, other)]
    pairs += [(a["options"], b["options"]) for a, b in zip(one["groups"], other["groups"], strict=False)]
    for a, b in pairs:
        for key in sorted((a.keys() | b.keys()) - {"groups"}):
            if a.get(key) != b.get(key):
                return f"{key!r} is {a.get(key)!r} and {b.get(key)!r}"
    return "groups of other parameters"


def _merged(stages: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Groups of one kind with equal options are one group, over all stages of a pipeline."""
    merged: dict[str, dict[str, Any]] = {}
    for of_stage in stages:
        for group in of_stage:
            same = json.dumps([group["kind"], group["options"]], sort_keys=True)
            before = merged.setdefault(same, {**group, "names": []})
            before["names"] = list(dict.fromkeys([*before["names"], *group["names"]]))
    return list(merged.values())


def generators(mesh: Mesh) -> list[Part]:
    """The state of torch's default generators on this rank, copied."""
    return [
        Part(f"generator/{kind}/{mesh.rank:05d}", tuple(state.shape), ((0, len(state)),), state, (0, len(state)))
        for kind, state in zip(("cpu", "cuda"), random_state(mesh.device), strict=False)
    ]


def meet_to_save(engine: Engine, opens: bool = False) -> None:
    """Before a checkpoint all ranks meet. One that steps instead hears of it, and so do the others (IG555)."""
    engine._gather_step_status(Status.OPENS if opens else Status.SAVES)


def drop_step(engine: Engine) -> None:
    """All ranks together: nothing of the step under way is left."""
    engine._drop()


@torch.no_grad()
def refresh_masters(engine: Engine) -> None:
    """After tensors were read into parts: make equal again what this rank keeps twice."""
    for slot in engine.plan.slots:
        if slot in engine._sharded_optimizer.across:  # its parts are collected at each step
            continue
        master, kept = engine._sharded_optimizer.masters[slot.name], engine.local_shard(slot.name)
        rows = kept if kept.shape == master.shape else slot.rows(kept)
        if master.dtype == rows.dtype and master.device != rows.device:  # offloaded fp32
            master.copy_(rows)
    if engine._zero3 is not None:
        engine._zero3.stepped()
    engine.step_state.mark_consistent()
