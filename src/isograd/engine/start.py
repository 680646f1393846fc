"""What the engine refuses, at start where it can and at the call that goes wrong where it cannot.

Each refusal names a state in which gradients would be silently wrong.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.fingerprint import first_unlike
from isograd.contract import Record, Table
from isograd.engine.hooks import Handles
from isograd.engine.plan import Plan, check_same
from isograd.engine.withheld import OWN_SUM, Withheld
from isograd.errors import EngineError
from isograd.mesh import DATA, Mesh
from isograd.pipeline import Pipeline
from isograd.tallies import Tallies

_OURS = "_isograd_hook"  # marks functions of isograd, which change no gradient: an engine's, the verifier's


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "DeepSpeedEngine")


def refuse_wrapped(model: nn.Module, mesh: Mesh) -> None:
    """Another library that reduces gradients as well would count them twice."""
    for name, module in model.named_modules():
        kinds = [kind for kind in type(module).__mro__ if kind.__name__ in WRAPPERS]
        if kinds:
            raise EngineError(
                "IG557",
                "the model is wrapped in something that reduces gradients itself",
                seen=f"{kinds[0].__module__}.{kinds[0].__qualname__}" + (f" at {name!r}" if name else ""),
                expected="the bare module: an engine reduces, shards and gathers for itself",
                fix="give the module inside: model.module for DDP; for FSDP do not call fully_shard, take zero3",
                where=mesh.where(),
            )


def pipeline_of(model: nn.Module, mesh: Mesh, reproducible: bool) -> Pipeline | None:
    """The stages of this rank, for a layout with a pipeline."""
    if mesh.size("pp") == 1:
        return None
    found = getattr(model, "chunks", None)
    if not isinstance(found, dict):
        raise EngineError(
            "IG519",
            f"this model is not cut into stages, which {str(mesh.layout)!r} needs",
            seen=type(model).__name__,
            expected="isograd's Transformer, or ig.pipeline.Stages([...], mesh, loss=...)",
            where=mesh.where(),
        )
    if reproducible:
        raise EngineError(
            "IG520",
            "reproducible sums are not built for pipelines",
            seen=f"reproducible=True under {str(mesh.layout)!r}",
            expected="reproducible=False, or a layout without pp",
            where=mesh.where(),
        )
    refuse: Callable[[Any], None] = getattr(model, "refuse_micro", None) or (lambda micro: None)
    return Pipeline(found, mesh, refuse, products=getattr(model, "hands_out_products", False))


def refuse_idle_stage(table: Table, mesh: Mesh) -> None:
    """Each rank's optimizer needs something to step; said on all stages, which would wait for the one that has none."""
    trainable = torch.tensor(sum(r.parameter.requires_grad for r in table), device=mesh.device)
    counts = [int(n) for n in raw.gather_list(trainable, mesh.group("pp"))]
    if mesh.size("pp") > 1 and 0 in counts:
        raise EngineError(
            "IG523",
            "a rank of the pipeline has nothing to train",
            seen=f"trainable parameters of the pp ranks: {counts}",
            expected="at least one on each",
            fix="give split= so that each rank has a layer that trains, or use fewer pp ranks",
            where=mesh.where(),
        )


def refuse_alone(pipeline: Pipeline | None, mesh: Mesh) -> None:
    """A backward of one rank's own loss makes no sense when the model lives on several."""
    if pipeline is not None:
        raise EngineError(
            "IG521",
            "engine.backward cannot run a pipeline",
            seen=f"backward under {str(mesh.layout)!r}",
            expected="engine.train_step(batch, micro_batches=k), which runs every layout",
            where=mesh.where(),
        )


def most_slots(plan: Plan, mesh: Mesh) -> int:
    """The number of parameters of the stage that has most."""
    count = torch.tensor(len(plan.slots), device=mesh.device)
    return max(int(n) for n in raw.gather_list(count, mesh.group("pp")))


def take_over(model: nn.Module) -> None:
    """A step that the holder before has left in the middle is dropped: what it shows in `.grad` is a stand-in, or one
    rank's own sum. An engine of stage 3 keeps shards only: the next one of the model starts from whole parameters."""
    for parameter in model.parameters():
        if isinstance(parameter.grad, Withheld) or getattr(parameter.grad, OWN_SUM, False):
            parameter.grad = None
    before = getattr(model, "_isograd_units", None)
    if before is not None:
        before.dissolve()
        del model._isograd_units


def check_offload(offload: bool, mesh: Mesh) -> None:
    """Where there is only one memory, or whole parameters are stepped, there is nothing to move."""
    if offload and mesh.layout.zero == 0:
        raise EngineError(
            "IG527",
            "offload needs row shards",
            seen=f"offload=True under {str(mesh.layout)!r}",
            expected="zero1, zero2 or zero3: at zero0 every rank steps whole parameters where they are",
            where=mesh.where(),
        )
    if offload and mesh.device.type == "cpu" and mesh.rank == 0:
        warnings.warn("offload=True has no effect on the CPU: it has no second memory", stacklevel=3)


def check_accumulation(mode: str, mesh: Mesh, *, overlap: bool, reproducible: bool) -> None:
    """Refuse a way to accumulate that is unknown, or that another option contradicts."""
    if mode not in ("local", "sharded"):
        raise _accumulation(mode, "no such way to accumulate", "'local' or 'sharded'", mesh)
    asked = {"overlap=False": not overlap, "reproducible=True": reproducible, "a pipeline": mesh.size("pp") > 1}
    against = [what for what, given in asked.items() if given]
    if mode == "sharded" and against:
        what = f"gradients cannot be reduced after each micro-batch with {' and '.join(against)}"
        raise _accumulation(mode, what, "accumulate='local': these reduce once in a step", mesh)


def _accumulation(mode: str, what: str, expected: str, mesh: Mesh) -> EngineError:
    return EngineError("IG532", what, seen=f"accumulate={mode!r}", expected=expected, where=mesh.where())


def check_plan(plan: Plan, mesh: Mesh) -> None:
    """Members that will add shards hold the same names, shapes and rows; storage is what shards can be views of."""
    for axes in sorted({DATA, *(axes for slot in plan.slots for axes in (slot.contract.data, *slot.contract.owes))}):
        what = "the trainable parameters" if axes == DATA else f"the parameters that owe {axes!r}"
        check_same(mesh, axes, plan.fingerprint(axes), what)
    for slot in plan.slots:
        if slot.parameter.grad is not None:
            raise EngineError(
                "IG507",
                f"parameter {slot.name!r} already carries a gradient",
                seen="a backward ran before the Engine was made",
                expected="gradients that the engine has weighed itself",
                fix="call model.zero_grad() before making the Engine",
                where=mesh.where(),
            )
        slot.parameter.data = slot.parameter.data.contiguous()


@torch.no_grad()
def equal_replicas(model: nn.Module, table: Table, mesh: Mesh) -> None:
    """Data replicas start equal because the first one is broadcast; replicas over tp must already be equal."""
    made = [record for record in table if not record.parameter.is_meta]  # others are functions of names, or stored
    for record in made:
        raw.broadcast_(record.parameter.data, mesh.group(record.contract.data))
    for buffer in model.buffers():
        raw.broadcast_(buffer, mesh.group(DATA))
    for beside in sorted({record.contract.beside for record in made}):
        _refuse_unequal([r for r in made if r.contract.beside == beside and not r.contract.cut], beside, mesh)
    for axes in sorted({axes for record in made for axes in record.contract.ties}):
        _refuse_unequal(sorted((r for r in made if axes in r.contract.ties), key=lambda r: r.name), axes, mesh)


def _refuse_unequal(replicated: list[Record], axes: str, mesh: Mesh) -> None:
    group = mesh.group(axes)
    if group.size == 1 or not replicated:
        return
    found = first_unlike({record.name: record.parameter for record in replicated}, group)
    if found is not None:
        rank, unlike = found
        raise EngineError(
            "IG506",
            f"replicated parameters start with different values on ranks of {axes!r}",
            seen=f"unlike rank {rank}: {unlike[:8]}{' ...' if len(unlike) > 8 else ''}",
            expected="equal bytes on every rank that holds a copy",
            fix="build the model from the same seed on all ranks (isograd layers do), or load the same weights",
            where=mesh.where(),
        )


def check_loss(loss: Tensor, weight: float | Tensor, mesh: Mesh) -> None:
    """Refuse a loss that backward cannot start from, and a weight that is not one number."""
    if not isinstance(loss, Tensor):
        raise EngineError(
            "IG513",
            "backward of what is no loss",
            seen=type(loss).__name__,
            expected="one tensor, or ig.Terms",
            where=mesh.where(),
        )
    if not loss.requires_grad:
        raise EngineError(
            "IG513",
            "backward of a loss that does not need a gradient",
            seen="loss.requires_grad is False: detached, computed under no_grad, or independent of every parameter",
            expected="a loss computed by the model with gradients enabled",
            where=mesh.where(),
        )
    if loss.numel() != 1:
        raise EngineError(
            "IG514",
            "backward of a loss that is not one number",
            seen=f"shape {tuple(loss.shape)}",
            expected="a scalar: the mean over this rank's tokens, with weight= their number",
            where=mesh.where(),
        )
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    if math.prod(shape) != 1 or not isinstance(weight, Tensor | Real):
        raise EngineError(
            "IG515",
            "the weight of a loss is not one number",
            seen=f"shape {shape}" if isinstance(weight, Tensor) else repr(weight),
            expected="the number of tokens (rows, ...) the loss is the mean of",
            where=mesh.where(),
        )
    if not isinstance(weight, Tensor) or weight.device.type == "cpu":  # on a GPU: found at the step
        check_weight(float(weight), mesh)


def check_weight(weight: float, mesh: Mesh) -> None:
    """Refuse a negative or NaN weight."""
    if not weight >= 0:
        raise EngineError(
            "IG515",
            "the weight of a loss is negative or NaN",
            seen=weight,
            expected="the number of tokens (rows, ...) the loss is the mean of; 0 for a rank without any",
            where=mesh.where(),
        )


def adds_nothing(loss: Tensor, weight: float | Tensor, mesh: Mesh) -> bool:
    """A mean over no token is NaN in torch, and so is its gradient, whatever it is multiplied with: leave it out.

    A weight on a GPU is not looked at, which would make the GPU wait; isograd's own losses are 0 over no token.
    """
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return False
    nothing = float(weight) == 0 and not bool(loss.isfinite())
    if nothing and others_need(mesh):
        raise needed_elsewhere(loss, mesh)
    return nothing


def others_need(mesh: Mesh) -> bool:
    """Whether layers exchange with other ranks in backward."""
    return mesh.size("cp") > 1 or mesh.size("ep") > 1


def needed_elsewhere(loss: Tensor, mesh: Mesh) -> EngineError:
    """The gradient of a loss over nothing is NaN, and other ranks need the messages of its backward."""
    return EngineError(
        "IG524",
        "a rank without labels has a loss that is not finite, and cannot leave out its backward",
        seen=f"loss {float(loss.detach())} with weight 0 under {str(mesh.layout)!r}",
        expected="a loss of 0 over no label: its backward gives other cp ranks the gradients of their keys, and other "
        "ep ranks those of their tokens; at ZeRO 3 other ranks gather parameters with the backward of each term",
        fix="divide by the number of labels, but at least by 1: loss = losses.sum() / max(1, labels)",
        where=mesh.where(),
    )


def refuse_half_loss(loss: Tensor, mesh: Mesh, *, in_one_run: bool) -> None:
    """The ledger seeds it with a power of two and multiplies this rank's gradients by the rest of the weight. It can do
    that only to gradients that this run of autograd makes here."""
    elsewhere = [f"{axis}{mesh.size(axis)}" for axis in ("pp", "cp", "ep") if mesh.size(axis) > 1]
    if not elsewhere and in_one_run:
        return
    why = f"the backward of other ranks ({' '.join(elsewhere)})" if elsewhere else "further runs of autograd"
    raise EngineError(
        "IG567",
        f"a loss in half precision whose gradient enters {why}",
        seen=str(loss.dtype),
        expected="float32 or float64: a weight has more digits than half precision",
        fix="compute the loss in float32, for example from logits.float()",
        where=mesh.where(),
    )


def refuse_in_no_sync(syncing: bool, mesh: Mesh) -> None:
    """A step whose gradients are not to be reduced."""
    if not syncing:
        raise EngineError(
            "IG511",
            "step() was called inside no_sync()",
            seen="no_sync is still open",
            expected="step() after the with-block",
            fix="move engine.step() out of 'with engine.no_sync():'",
            where=mesh.where(),
        )


def hooks_of(parameter: nn.Parameter) -> int:
    """How many functions of the program are called when a gradient has been accumulated into `.grad`."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return sum(not hasattr(hook, _OURS) for hook in hooks.values())


def is_watched(parameter: nn.Parameter) -> bool:
    """Whether others than an Engine have hooks on this parameter's gradient."""
    theirs = len(getattr(parameter, "_backward_hooks", None) or ()) + len(
        getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    )
    return theirs > len(getattr(parameter, "_isograd_hooks", ()))


def replace_hook(
    parameter: nn.Parameter,
    arrived: Callable[[Tensor], None],
    entering: Callable[[Tensor], Tensor | None] | None = None,
) -> None:
    """One engine holds a parameter: a new one takes it over from the one before. `entering` is called with a gradient
    before it is added to `.grad`, `arrived` after that."""
    for handle in getattr(parameter, "_isograd_hooks", ()):
        handle.remove()
    setattr(arrived, _OURS, True)
    handles = [parameter.register_post_accumulate_grad_hook(arrived)]
    handles += [parameter.register_hook(entering)] if entering is not None else []
    parameter._isograd_hooks = Handles(handles)  # type: ignore[attr-defined]


def refuse_options(given: Mapping[str, object], only: Mapping[str, object], mesh: Mesh) -> None:
    """Of torch's DistributedDataParallel: what would ask for something else than is done."""
    wrong = {name: value for name, value in given.items() if name not in only or value != only[name]}
    if wrong:
        raise EngineError(
            "IG533",
            "DataParallel was given options that it does not have",
            seen=wrong,
            expected=f"of DDP's, beside those that change nothing here: {dict(only)}",
            fix="leave them out; mixed precision: autocast or model.to(torch.bfloat16); other groups: ig.Engine",
            where=mesh.where(),
        )


def refuse_cut(table: Table, mesh: Mesh) -> None:
    """DataParallel adds up whole parameters: of experts or tp parts it would add those of different ranks."""
    cut = [f"{record.name} over {shard.axis}" for record in table for shard in record.contract.shards]
    if cut:
        raise EngineError(
            "IG539",
            "DataParallel was given a model of which each rank has a part",
            seen=f"cut: {cut[:4]}{' ...' if len(cut) > 4 else ''}",
            expected="a model that is whole on every rank",
            fix="ig.Engine(model, mesh, ...), which knows tp and ep; or build the model on a mesh of dp ranks",
            where=mesh.where(),
        )


def refuse_counting(model: nn.Module, mesh: Mesh) -> None:
    """DataParallel does not see when a step begins and whether it is taken."""
    layers = len(Tallies(model, mesh).members)
    if layers:
        raise EngineError(
            "IG569",
            "DataParallel was given a model with experts",
            seen=f"{layers} layers that count over a step which tokens their experts get",
            expected="a model without experts: their counts are used once, when a step is taken",
            fix="ig.Engine(model, mesh, ...), which also divides each term of the loss by its own weight",
            where=mesh.where(),
        )


def check_devices(devices: Sequence[Any] | None, output: Any, home: torch.device, mesh: Mesh) -> None:
    """One rank, one device: the module's."""
    asked = [*(devices or ()), *([] if output is None else [output])]
    # A number is a GPU's.
    wrong = [d for d in asked if (torch.device("cuda", d) if isinstance(d, int) else torch.device(d)) != home]
    if wrong or len(devices or ()) > 1:
        raise EngineError(
            "IG534",
            "device_ids or output_device name another device than the module's",
            seen=f"device_ids={devices}, output_device={output}; the module lies on {home}",
            expected="nothing, or the one device that the module lies on",
            fix="module.to(device) first, and one process for each device",
            where=mesh.where(),
        )


def check_weights(plain: Tensor, weighed: Tensor, mesh: Mesh) -> None:
    """For each rank, whether some of its backwards were not weighed, and whether some were."""
    if plain.any() and weighed.any():
        raise EngineError(
            "IG535",
            "some backwards were weighed and some were not",
            seen=f"ranks without model.weigh: {plain.nonzero().flatten().tolist()}; "
            f"with it: {weighed.nonzero().flatten().tolist()}",
            expected="loss = model.weigh(loss, count) before each backward, or before none",
            where=mesh.where(),
        )


class Watch:
    """Notices that the model is no longer the one the engine was made with."""

    def __init__(self, model: nn.Module, plan: Plan, moving: bool) -> None:
        """`moving`: parameters are not in one place (ZeRO 3)."""
        self._model, self._moving = model, moving
        self._known = {slot.name: self._look(slot.parameter) for slot in plan.slots}

    def _look(self, parameter: nn.Parameter) -> tuple[object, ...]:
        place = 0 if self._moving else parameter.data_ptr()
        return id(parameter), place, parameter.requires_grad, parameter.dtype, hooks_of(parameter)

    def problem(self, mesh: Mesh) -> EngineError | None:
        """The error if the model is no longer the one the Engine was made for; None if it is."""
        now = {name: self._look(p) for name, p in self._model.named_parameters() if p.requires_grad}
        if now != self._known:
            changed = sorted(n for n in now.keys() | self._known.keys() if now.get(n) != self._known.get(n))
            return EngineError(
                "IG517",
                "the model was changed after the Engine was made",
                seen="added, removed, moved, cast, frozen, unfrozen or given a hook for accumulated gradients: "
                f"{changed[:8]}",
                expected="the parameters the engine shards and reduces, in the same memory",
                fix="change the model first (to(dtype), freeze, add layers), then make a new Engine",
                where=mesh.where(),
            )
        return None
