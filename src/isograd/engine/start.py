"""What the engine refuses, at start where it can and at the call that goes wrong where it cannot.

Each refusal names a state in which gradients would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.fingerprint import fingerprint
from isograd.contract import Table
from isograd.engine.plan import Plan, check_same
from isograd.errors import EngineError
from isograd.mesh import DATA, Mesh


def refuse_unbuilt(mesh: Mesh) -> None:
    """Layouts that this version can describe but not yet run."""
    layout = mesh.layout
    waiting = [f"{axis}{layout.size(axis)}" for axis in ("pp",) if layout.size(axis) > 1]
    waiting += [f"ep{layout.ep}"] if layout.ep > 1 else []
    waiting += ["zero3"] if layout.zero > 2 else []
    if waiting:
        raise EngineError(
            "IG500",
            f"the engine of this version does not run {', '.join(waiting)}",
            seen=str(layout),
            expected="a layout of dp, cp, tp, sp and zero0 to zero2",
            fix="leave those axes out; README.md lists which layouts are built and tested",
            where=mesh.where(),
        )


def check_plan(plan: Plan, table: Table, mesh: Mesh) -> None:
    """Members that will add shards hold the same names, shapes and rows; storage is what shards can be views of."""
    check_same(mesh, DATA, plan.fingerprint(None), "the trainable parameters")
    for axes in sorted({axes for slot in plan.slots for axes in slot.contract.owes}):
        check_same(mesh, axes, plan.fingerprint(axes), f"the parameters that owe {axes!r}")
    for record in table:
        if record.parameter.device.type == "meta":
            raise EngineError(
                "IG503",
                f"parameter {record.name!r} has no memory",
                seen="device='meta'",
                expected="a model whose parameters are allocated and initialised",
                where=mesh.where(),
            )
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
    data, tp = mesh.group(DATA), mesh.group("tp")
    for tensor in [record.parameter.data for record in table] + list(model.buffers()):
        raw.broadcast_(tensor, data)
    if tp.size == 1:
        return
    replicated = [r for r in table if not any(s.axis == "tp" for s in r.contract.shards)]
    if not replicated:
        return
    prints = torch.stack([fingerprint(r.parameter) for r in replicated])
    for rank, other in zip(tp.ranks, raw.gather_list(prints, tp), strict=True):
        unlike = [r.name for r, a, b in zip(replicated, prints, other, strict=True) if a != b]
        if unlike:
            raise EngineError(
                "IG506",
                "replicated parameters start with different values on tp ranks",
                seen=f"unlike rank {rank}: {unlike[:8]}{' ...' if len(unlike) > 8 else ''}",
                expected="equal bytes on every rank of a tp group",
                fix="build the model from the same seed on all tp ranks (isograd layers do), or load the same weights",
                where=mesh.where(),
            )


def check_loss(loss: Tensor, weight: float | Tensor, mesh: Mesh) -> None:
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
    if isinstance(weight, float | int) and not weight >= 0:
        raise EngineError(
            "IG515",
            "the weight of a loss is negative or NaN",
            seen=weight,
            expected="the number of tokens (rows, ...) the loss is the mean of; 0 for a rank without any",
            where=mesh.where(),
        )


def adds_nothing(loss: Tensor, weight: float | Tensor) -> bool:
    """A mean over no token is NaN in torch, and so is its gradient, whatever it is multiplied with: leave it out.

    A weight on a GPU is not looked at, which would make the GPU wait; isograd's own losses are 0 over no token.
    """
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return False
    return float(weight) == 0 and not bool(loss.isfinite())


def replace_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """One engine holds a parameter: a new one takes it over from the one before."""
    before = getattr(parameter, "_isograd_hook", None)
    if before is not None:
        before.remove()
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter._isograd_hook = handle  # type: ignore[attr-defined]


def check_peers(table: Tensor, mesh: Mesh) -> None:
    """Ranks of one tp group work on the same batch: their weights agree. Row i of the table is rank i's."""
    peers = list(mesh.layout.ranks("tp", mesh.rank))
    weights = table[peers, 0]
    if bool((weights != weights[0]).any()):
        raise EngineError(
            "IG516",
            "ranks of one tp group were given different batches",
            seen=f"weights {weights.tolist()} on ranks {peers}",
            expected="the same sequences on every rank of a tp or cp group: only dp ranks see different ones",
            fix="index the data by mesh.index('dp'), not by the global rank",
            where=mesh.where(),
        )


class Watch:
    """Notices that the model is no longer the one the engine was made with."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        self._known = {slot.name: self._look(slot.parameter) for slot in plan.slots}

    @staticmethod
    def _look(parameter: nn.Parameter) -> tuple[object, ...]:
        return id(parameter), parameter.data_ptr(), parameter.requires_grad, parameter.dtype

    def check(self, mesh: Mesh) -> None:
        now = {name: self._look(p) for name, p in self._model.named_parameters() if p.requires_grad}
        if now != self._known:
            changed = sorted(n for n in now.keys() | self._known.keys() if now.get(n) != self._known.get(n))
            raise EngineError(
                "IG517",
                "the model was changed after the Engine was made",
                seen=f"added, removed, moved, cast, frozen or unfrozen: {changed[:8]}",
                expected="the parameters the engine shards and reduces, in the same memory",
                fix="change the model first (to(dtype), freeze, add layers), then make a new Engine",
                where=mesh.where(),
            )
