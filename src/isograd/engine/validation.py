"""What the engine refuses, at start where it can and else at the call that goes wrong; and how it takes a model over.

Each refusal names a state in which gradients would be silently wrong. To take over: the holder before is detached,
replicas are made equal, and each parameter gets the hook with which its gradient enters the step (`replace_hook`).
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from numbers import Real
from typing import Any, TypeVar
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object, run_or_raise_on_all_ranks
from isograd.comm.fingerprint import first_unlike
from isograd.core.contract_table import ContractRow, ContractTable
from isograd.core.mesh import DATA, STAGE, Mesh
from isograd.engine.grad_placeholder import GradPlaceholder, set_grads
from isograd.engine.plan import Plan, Slot
from isograd.engine.precision import LossScale
from isograd.engine.zero3.deferred_init import place
from isograd.engine.zero3.module_hooks import Handles, owner_of
from isograd.errors import EngineError, IsogradError, headline
from isograd.nn.fp32_sums import needing_fp32_sums
from isograd.pipeline import Pipeline

_OURS = "_isograd_hook"  # marks functions of the verifier, which change no gradient
T = TypeVar("T")
WRITTEN = ("architectures", "dtype")  # into a model's config by `save_pretrained`, perhaps on one rank alone
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "DeepSpeedEngine")


def check_arguments(model: Any, mesh: Any, optimizer: Any) -> None:
    """Refuse what is no model, no mesh or no function: torch's order has the optimizer second, and a made one."""
    if not (isinstance(model, nn.Module) and isinstance(mesh, Mesh) and callable(optimizer)):
        given = ", ".join(type(one).__name__ for one in (model, mesh, optimizer))
        raise EngineError("IG500", seen=f"Engine({given})")


def refuse_wrapped(model: nn.Module, mesh: Mesh) -> None:
    """Another library that reduces gradients as well would count them twice."""
    for name, m in model.named_modules():
        kinds = [k for p in (m, *m.parameters(False)) for k in type(p).__mro__ if k.__name__ in (*WRAPPERS, "DTensor")]
        if kinds:
            seen = f"{kinds[0].__module__}.{kinds[0].__qualname__}" + (f" at {name!r}" if name else "")
            raise EngineError("IG557", seen=seen, where=mesh.describe_rank())


def clip_problem(clip: object, mesh: Mesh) -> EngineError | None:
    """It may be set between steps."""
    right = clip is None or (isinstance(clip, Real) and float(clip) >= 0)
    return None if right else EngineError("IG522", seen=f"clip={clip!r}", where=mesh.describe_rank())


def refuse_parameters(model: nn.Module, table: ContractTable, mesh: Mesh) -> None:
    """Of one rank's own: the engine trains real gradients, one value for each element, and weighs each itself; and it
    needs something to train."""
    trained = [record for record in table if record.parameter.requires_grad]
    for record in trained:
        if record.parameter.grad is not None:
            raise EngineError("IG507", where=mesh.describe_rank(), name=record.name)
    if not trained and mesh.size("pp") == 1:  # one of several stages: IG523
        raise EngineError("IG501", seen=f"{len(table)} parameters, all frozen", where=mesh.describe_rank())
    if hooked := [r.name for r in table if hooks_of(r.parameter)]:
        raise EngineError("IG545", where=mesh.describe_rank(), names=hooked[:8])
    if complex_ones := [r.name for r in trained if r.parameter.is_complex()]:
        raise EngineError("IG541", seen=f"complex: {complex_ones[:8]}", where=mesh.describe_rank())
    tables = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if sparse := [f"{name}.weight" for name, module in tables if module.weight.requires_grad]:
        raise EngineError("IG544", seen=f"sparse=True: {sparse[:8]}", where=mesh.describe_rank())


def widest_stage(table: ContractTable, mesh: Mesh, options: Mapping[str, object]) -> int:
    """The number of trainable parameters of the stage that has most. On all ranks alike, refuses stages of which some
    have none, and `options` that are not equal: by them ranks scale, or send and wait."""
    count = sum(record.parameter.requires_grad for record in table)
    notes = all_gather_object([{name: str(value) for name, value in options.items()}, count], mesh)
    counts = [notes[rank][1] for rank in mesh.ranks("pp")]
    if len(counts) > 1 and not all(count for _, count in notes):  # each rank's optimizer needs something to step
        raise EngineError("IG523", seen=f"trainable parameters of the pp ranks: {counts}", where=mesh.describe_rank())
    given = {name: {said[name] for said, _ in notes} for name in options}
    unlike = [f"{name} is {' or '.join(sorted(values))}" for name, values in given.items() if len(values) > 1]
    if unlike:
        raise EngineError("IG522", seen="; ".join(unlike), where=mesh.describe_rank())
    return int(max(counts))


def warn_of_half_sums(model: nn.Module, mesh: Mesh) -> None:
    """torch adds gradients of embeddings and norms in the dtype of the weight, on CPUs."""
    if mesh.rank or mesh.device.type != "cpu":
        return
    trained = {
        name: any(p.requires_grad and p.dtype.itemsize < 4 for p in model.get_submodule(name).parameters(recurse=False))
        for name in needing_fp32_sums(model)
    }
    if found := [name for name, is_trained in trained.items() if is_trained]:
        warnings.warn(
            f"on CPUs torch adds up the half-precision gradients of {', '.join(found[:4])} in half precision, and "
            "loses most of long sums: call isograd.nn.use_fp32_sums(model) before the Engine is made",
            stacklevel=3,
        )


def check_together(check: Callable[[], T], mesh: Mesh) -> T:
    """The result of a check that sends nothing. What one rank refuses is raised on all of them: they would wait."""
    return run_or_raise_on_all_ranks(
        check, mesh, EngineError, lambda error: EngineError("IG522", seen=headline(error), where=mesh.describe_rank())
    )


def refuse_without_stages(model: nn.Module, mesh: Mesh) -> None:
    """A model that is not cut into the stages of the layout."""
    if mesh.size("pp") > 1 and not isinstance(getattr(model, "chunks", None), dict):
        raise EngineError("IG519", seen=type(model).__name__, where=mesh.describe_rank(), layout=str(mesh.layout))


def pipeline_of(model: nn.Module, mesh: Mesh) -> Pipeline | None:
    """The stages of this rank, for a layout with a pipeline. Neighbours make their groups here, together."""
    refuse_without_stages(model, mesh)
    if mesh.size("pp") == 1:
        return None
    refuse: Callable[[Any], None] = getattr(model, "refuse_micro", None) or (lambda micro: None)
    return Pipeline(model, model.chunks, mesh, refuse)  # type: ignore[arg-type]


def detach_previous_engine(model: nn.Module, mesh: Mesh) -> None:
    """A step that the holder before has left in the middle is dropped: what it shows in `.grad` is a stand-in, or one
    rank's own sum, and what any rank has sent of it lands first, or it would meet the messages of the next holder.
    An engine of stage 3 keeps shards only: the next one of the model starts from whole parameters."""
    found = [getattr(getattr(p, "_isograd_hooks", None), "holder", None) for p in model.parameters()]
    shown = zip(model.parameters(), found, strict=True)
    set_grads(
        [(p, None) for p, h in shown if isinstance(p.grad, GradPlaceholder) or (h is not None and h.shows_own_sum(p))]
    )
    holders = [h for h in dict.fromkeys(found) if h is not None and h.status_group.transport is not None]
    if any(all_gather_object(any(holder.reducer.sent for holder in holders), mesh)):
        for holder in holders:
            holder.abandon()
    before = owner_of(model)
    if before is not None:
        before.dissolve()


def check_options(model: nn.Module, mesh: Mesh, offload: bool, accumulate: str, options: Mapping[str, Any]) -> None:
    """What one rank can say of its own model and options."""
    refuse_wrapped(model, mesh)
    refuse_without_stages(model, mesh)
    bucket, scale, repeats = options["bucket_mb"], options["loss_scale"], options["reproducible"]
    if (problem := clip_problem(options["clip"], mesh)) is not None:
        raise problem
    if not (isinstance(bucket, Real) and 0 < float(bucket) < math.inf):
        raise EngineError("IG522", seen=f"bucket_mb={bucket!r}", where=mesh.describe_rank())
    if not (scale is None or isinstance(scale, LossScale)):
        raise EngineError("IG522", seen=f"loss_scale={scale!r}", where=mesh.describe_rank())
    if mesh.size("pp") > 1 and repeats:
        raise EngineError("IG520", seen=f"reproducible=True under {str(mesh.layout)!r}", where=mesh.describe_rank())
    asked = {"overlap=False": not options["overlap"], "reproducible=True": repeats, "a pipeline": mesh.size("pp") > 1}
    against = [what for what, given in asked.items() if given]
    what, expected = "no such way to accumulate", "'local' or 'sharded'"
    if accumulate == "sharded" and against:
        what = f"gradients cannot be reduced after each micro-batch with {' and '.join(against)}"
        expected = "accumulate='local': these reduce once in a step"
    if (accumulate == "sharded" and against) or accumulate not in ("local", "sharded"):
        seen = f"accumulate={accumulate!r}"
        raise EngineError("IG532", what, seen=seen, expected=expected, where=mesh.describe_rank())
    if offload and mesh.layout.zero == 0:  # whole parameters are stepped
        raise EngineError("IG527", seen=f"offload=True under {str(mesh.layout)!r}", where=mesh.describe_rank())
    if offload and mesh.device.type == "cpu" and mesh.rank == 0:
        warnings.warn("offload=True has no effect on the CPU: it has no second memory", stacklevel=2)


def refuse_shared_elements(plan: Plan, mesh: Mesh) -> None:
    """What is made contiguous gets memory of its own: parameters that shared elements would part there."""
    alike: dict[int, list[Any]] = {}
    for slot in plan.slots:
        if not slot.parameter.is_meta:
            alike.setdefault(slot.parameter.untyped_storage().data_ptr(), []).append(slot)
    for slots in alike.values():
        if len(slots) > 1 and not all(slot.parameter.is_contiguous() for slot in slots):
            taken = torch.zeros(slots[0].parameter.untyped_storage().nbytes(), dtype=torch.bool)
            for slot in slots:
                strides = slot.parameter.stride()
                shape = [size if stride else 1 for size, stride in zip(slot.parameter.shape, strides, strict=True)]
                place = taken.as_strided(shape, strides, slot.parameter.storage_offset())
                if place.any():
                    names = [slot.name for slot in slots]
                    raise EngineError("IG573", seen=f"{names}, in different orders", where=mesh.describe_rank())
                place.fill_(True)


def check_plan(plan: Plan, table: ContractTable, model: nn.Module, mesh: Mesh) -> None:
    """Members that will add shards hold the same names, shapes and rows; the ranks of a stage train the same
    parameters, and all ranks one model. Storage is what shards can be views of. Refused on all ranks."""
    owed = {axes for slot in plan.slots for axes in (slot.contract.data, *slot.contract.partial_over)}
    names = sorted((r.name, r.parameter.requires_grad, str(r.parameter.dtype)) for r in table)
    said = {axes: plan.fingerprint(axes) for axes in {DATA} | owed}
    said |= {STAGE: _digest(names), "world": _digest(_described(model))}
    whose = {DATA: "the trainable parameters", STAGE: "what is trained", "world": "the config or split of the model"}
    every = all_gather_object(said, mesh)
    for axes in sorted({axes for one in every for axes in one}):
        for group in mesh.layout.groups(axes, [rank for rank, one in enumerate(every) if axes in one]):
            different = [rank for rank in group if every[rank].get(axes) != every[group[0]].get(axes)]
            if different:
                differing = whose.get(axes, f"the parameters that owe {axes!r}")
                seen = f"ranks {different} disagree with rank {group[0]}"
                raise EngineError("IG502", seen=seen, where=mesh.describe_rank(), differing=differing, axes=axes)
    refuse_shared_elements(plan, mesh)
    for slot in plan.slots:
        place(slot.parameter, slot.parameter.data.contiguous())


def _digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()


def _described(model: nn.Module) -> list[object]:
    """The config of a model of isograd or transformers, without what saving or a folder writes, and the stages."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "model_type") and hasattr(config, "to_dict"):
        said = config.to_dict().items()
        config = sorted((name, repr(v)) for name, v in said if name[0] != "_" and name not in WRITTEN)
    elif not type(config).__module__.startswith("isograd."):
        config = None  # of somebody else, and perhaps of this rank alone
    return [re.sub(r" at 0x[0-9a-f]+", "", repr(config)), getattr(model, "parts", None)]


@torch.no_grad()
def equal_replicas(model: nn.Module, table: ContractTable, mesh: Mesh) -> None:
    """Data replicas start equal because the first one is broadcast; replicas over tp must already be equal."""
    made = [record for record in table if not record.parameter.is_meta]  # others are functions of names, or stored
    for record in made:
        raw.broadcast_(record.parameter.data, mesh.group(record.contract.data))
    for buffer in model.buffers():
        raw.broadcast_(buffer, mesh.group(DATA))
    for beside in sorted({record.contract.model_parallel_axis for record in made}):
        alike = [r for r in made if r.contract.model_parallel_axis == beside and not r.contract.cut]
        _refuse_unequal(alike, beside, mesh)
    for axes in sorted({axes for record in made for axes in record.contract.ties}):
        _refuse_unequal(sorted((r for r in made if axes in r.contract.ties), key=lambda r: r.name), axes, mesh)


def _refuse_unequal(replicated: list[ContractRow], axes: str, mesh: Mesh) -> None:
    group = mesh.group(axes)
    if group.size == 1 or not replicated:
        return
    if found := first_unlike({record.name: record.parameter for record in replicated}, group):
        rank, unlike = found
        seen = f"unlike rank {rank}: {unlike[:8]}{' ...' if len(unlike) > 8 else ''}"
        raise EngineError("IG506", seen=seen, where=mesh.describe_rank(), axes=axes)


def check_mean(name: str, value: Any, weight: Any, mesh: Mesh, *, trains: bool = True) -> None:
    """Refuse a loss, or a term of one, that backward cannot start from, and a weight that is not one number. `trains`:
    its gradient is asked for."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        seen = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise EngineError("IG514", seen=seen, where=mesh.describe_rank(), name=name)
    if not is_weight(weight):
        raise bad_weight(name, weight, mesh)
    if trains and not value.requires_grad:
        raise EngineError("IG513", where=mesh.describe_rank(), name=name)


def weight_of(given: float | Tensor | None, mesh: Mesh, first: bool) -> float | Tensor:
    """Left out, it is 1, which is said once where other losses of the step may be means of more. `first`: of a step."""
    if given is None and mesh.rank == 0 and not (first and mesh.size(DATA) == 1):
        warnings.warn(
            "engine.backward(loss) without a weight: each loss of the step counts as one. That is the gradient of the "
            "whole batch only if all are means of equally many tokens (rows, ...); else give weight=, how many",
            stacklevel=3,
        )
    return 1.0 if given is None else given


def is_weight(weight: object, waits: bool = False) -> bool:
    """`waits`: a number on a GPU is looked at, too; it is found at the step otherwise."""
    if isinstance(weight, Tensor):
        looks = waits or weight.device.type == "cpu"
        return weight.numel() == 1 and (not looks or 0 <= float(weight) < math.inf)
    return isinstance(weight, Real) and bool(0 <= weight <= torch.finfo(torch.float64).max)  # type: ignore[operator]


def bad_weight(name: str, seen: object, mesh: Mesh) -> EngineError:
    """IG515."""
    shown = seen if isinstance(seen, str) else repr(seen)
    return EngineError("IG515", seen=shown, where=mesh.describe_rank(), name=name)


def is_known_zero(weight: float | Tensor) -> bool:
    """A weight on a GPU is not looked at, which would make the host wait."""
    return (not isinstance(weight, Tensor) or weight.device.type == "cpu") and float(weight) == 0


def adds_nothing(loss: Tensor, weight: float | Tensor, mesh: Mesh) -> bool:
    """A mean over no token is NaN in torch, and so is its gradient, whatever it is multiplied with: leave it out.
    (isograd's own losses are 0 over no token.)"""
    nothing = is_known_zero(weight) and not bool(loss.isfinite())
    if nothing and (mesh.size("cp") > 1 or mesh.size("ep") > 1):  # whose layers exchange with other ranks in backward
        raise needed_elsewhere(loss, mesh)
    return nothing


def needed_elsewhere(loss: Tensor, mesh: Mesh) -> EngineError:
    """The gradient of a loss over nothing is NaN, and other ranks need the messages of its backward."""
    return EngineError("IG524", where=mesh.describe_rank(), loss=float(loss.detach()), layout=str(mesh.layout))


def refuse_half_loss(loss: Tensor, mesh: Mesh, *, in_one_run: bool) -> None:
    """A step seeds it with a power of two and multiplies this rank's gradients by the rest of the weight. It can do
    that only to gradients that this run of autograd makes here."""
    elsewhere = [f"{axis}{mesh.size(axis)}" for axis in ("pp", "cp", "ep") if mesh.size(axis) > 1]
    if not elsewhere and in_one_run:
        return
    there = f"the backward of other ranks ({' '.join(elsewhere)})" if elsewhere else "further runs of autograd"
    value = f"a loss whose gradient enters {there}"
    raise EngineError("IG567", seen=str(loss.dtype), where=mesh.describe_rank(), value=value)


def hooks_of(parameter: nn.Parameter) -> int:
    """How many functions of the program are called when a gradient has been accumulated into `.grad`."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    ours = {handle.id for handle in getattr(parameter, "_isograd_hooks", ())}
    return sum(key not in ours and not hasattr(hook, _OURS) for key, hook in hooks.items())


def is_watched(parameter: nn.Parameter) -> bool:
    """Whether others than an Engine have hooks on this parameter's gradient."""
    theirs = len(getattr(parameter, "_backward_hooks", None) or ()) + len(
        getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    )
    return theirs > len(getattr(parameter, "_isograd_hooks", ()))


def replace_hook(
    slot: Slot,
    holder: Any,
    arrived: Callable[[Slot, Tensor], None],
    entering: Callable[[Tensor], Tensor | None] | None = None,
) -> None:
    """One engine holds a parameter: a new one, whose step state is `holder`, takes it over, with half a step if that is
    in it. `entering` is called with a gradient before it is added to `.grad`, `arrived` after that: two methods, which
    a hook holds weakly. Python does not see through torch's hooks, and would keep what they hold for ever."""
    parameter, call, mine = slot.parameter, WeakMethod(arrived), ref(slot)

    def has_arrived(gradient: Tensor) -> None:
        method, own = call(), mine()
        if method is not None and own is not None:
            method(own, gradient)

    before = getattr(parameter, "_isograd_hooks", ())
    for handle in before:
        handle.remove()
    if (last := getattr(before, "holder", None)) is not None:  # a saved copy has a list without one
        last.taken_over.append(holder.made_at)
        if (why := last.torn(parameter)) is not None:
            holder.mark_inconsistent(f"{why} (in a step of the Engine made at {last.made_at})")
    handles = [parameter.register_post_accumulate_grad_hook(has_arrived)]
    if entering is not None:
        enters = WeakMethod(entering)
        handles.append(parameter.register_hook(lambda g: None if (m := enters()) is None else m(g)))
    parameter._isograd_hooks = Handles(handles, holder, arrived)  # type: ignore[attr-defined]


def refuse_cut(table: ContractTable, mesh: Mesh) -> None:
    """DataParallel adds up whole parameters: of experts or tp parts it would add those of different ranks."""
    cut = [f"{record.name} over {shard.axis}" for record in table for shard in record.contract.shards]
    if cut:
        raise EngineError("IG539", seen=f"cut: {cut[:4]}{' ...' if len(cut) > 4 else ''}", where=mesh.describe_rank())


def check_devices(devices: Sequence[Any] | None, output: Any, home: torch.device, mesh: Mesh) -> None:
    """One rank, one device: the module's."""
    asked = [*(devices or ()), *([] if output is None else [output])]
    # A number is a GPU's.
    wrong = [d for d in asked if (torch.device("cuda", d) if isinstance(d, int) else torch.device(d)) != home]
    if wrong or len(devices or ()) > 1:
        raise EngineError("IG534", where=mesh.describe_rank(), devices=devices, output=output, home=home)


class Watch:
    """Notices that the model is no longer the one the engine was made with."""

    def __init__(self, model: nn.Module, plan: Plan, moving: bool) -> None:
        """`moving`: parameters are not in one place (ZeRO 3)."""
        self._model, self._moving = model, moving
        self._known = {slot.name: self._look(slot.parameter) for slot in plan.slots}

    def _look(self, parameter: nn.Parameter) -> tuple[object, ...]:
        place = 0 if self._moving else parameter.data_ptr()
        return id(parameter), place, parameter.shape, parameter.requires_grad, parameter.dtype, hooks_of(parameter)

    @contextmanager
    def naming_changes(self, mesh: Mesh) -> Iterator[None]:
        """Where what was changed makes something raise: torch at other shapes, a new hook at a withheld `.grad`."""
        try:
            yield
        except Exception as error:
            changed = None if isinstance(error, IsogradError) else self.problem(mesh)
            if changed is None:
                raise
            raise changed from error

    def problem(self, mesh: Mesh) -> EngineError | None:
        """The error if the model is no longer the one the Engine was made for; None if it is."""
        now = {name: self._look(p) for name, p in self._model.named_parameters() if p.requires_grad}
        if now != self._known:
            changed = sorted(n for n in now.keys() | self._known.keys() if now.get(n) != self._known.get(n))
            return EngineError("IG517", where=mesh.describe_rank(), names=changed[:8])
        return None


def user_line() -> str:
    """'train.py:33': the nearest line that is neither isograd's nor torch's."""
    frame, ours = sys._getframe(1), ("isograd", "torch.", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
