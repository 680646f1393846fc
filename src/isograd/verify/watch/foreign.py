"""What a foreign program's distributed objects mean, in plain data. Beside comm/raw.py, the only file that looks into
torch.distributed, and it calls no collective: who the members of a group are, where a DTensor's shard sits, who I am.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # path segments that wrappers add
SHELLS = ("DistributedDataParallel", "DataParallel", "OptimizedModule", "DeepSpeedEngine", "FullyShardedDataParallel")

__all__ = ["DTensor", "box_of", "joined", "members", "plain_name", "shell", "whole_shape", "world"]


def joined() -> bool:
    """Whether this process has joined a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def world() -> tuple[int, int]:
    """(rank, world size): of the joined world, else what a launcher promised, else a world of one."""
    if joined():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


@lru_cache(maxsize=4096)
def _members_by_name(name: str, world_size: int) -> tuple[int, ...]:
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return tuple(dist.get_process_group_ranks(group))


def forget() -> None:
    """Groups' names begin again with a new world."""
    _members_by_name.cache_clear()


def placed() -> bool:
    """Whether this process knows its rank: it has joined a world, or its launcher told it."""
    return joined() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group that an operator received: as a name, or boxed for the dispatcher."""
    name = group if isinstance(group, str) else None
    if name is None:
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        name = group.group_name
    try:
        return _members_by_name(name, dist.get_world_size())
    except (RuntimeError, ValueError, KeyError):
        return tuple(range(group.size())) if hasattr(group, "size") else ()


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """A parameter's shape before it was cut, as far as it says so itself."""
    return tuple(parameter.shape)  # of a DTensor: the global one


def box_of(parameter: Tensor) -> tuple[tuple[int, int], ...] | None:
    """[start, stop] along each dimension of the global tensor, for what this rank holds; None when nothing says so."""
    if isinstance(parameter, DTensor):
        if any(isinstance(p, Partial) for p in parameter.placements):
            return None
        mesh = parameter.device_mesh
        if mesh.get_coordinate() is None:
            return None
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        if math.prod(shape) == 0:
            return tuple((0, 0) for _ in shape)
        return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
    contract = getattr(parameter, "_isograd_contract", None)
    if contract is not None and not contract.shards:
        return tuple((0, size) for size in contract.shape)
    return None


def replicated(parameter: Tensor) -> bool:
    """Whether a DTensor is whole on every rank."""
    return isinstance(parameter, DTensor) and all(isinstance(p, Replicate) for p in parameter.placements)


def shell(module: torch.nn.Module) -> bool:
    """Whether a module only wraps the user's model ('module.' in front of every name)."""
    return type(module).__name__ in SHELLS


def coefficients(module: torch.nn.Module) -> dict[str, float]:
    """What the config of a transformers model tells of its balance loss, when that is used: coefficient and number of
    experts."""
    config = getattr(module, "config", None)
    if getattr(config, "output_router_logits", False) is not True:
        return {}
    numbers = [getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    told = {
        "router_aux_loss_coef": getattr(config, "router_aux_loss_coef", None),
        "num_experts": next((number for number in numbers if number is not None), None),
    }
    return {name: float(value) for name, value in told.items() if isinstance(value, float | int)}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def misplaced(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether `placed_like` would have to communicate."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return False
    return gradient.placements != parameter.placements


def placed_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, cut as its parameter is. DTensor leaves some gradients partial or whole until a
    step needs them; bringing them into place is what that step would do, and the only time the capture communicates."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and misplaced(parameter, gradient):
        with torch.no_grad():
            return gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()
    return local(gradient)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without communication, and a sparse gradient as a dense one; anything else as it
    is."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.to_dense() if tensor.is_sparse else tensor


def imagined(values: Any) -> bool:
    """Whether tensors without contents are among some arguments: shapes are computed, and nothing else (DTensor's
    propagation of shapes, a pipeline stage's, tracing)."""
    if isinstance(values, Tensor):
        return values.is_meta or isinstance(values, FakeTensor)
    return isinstance(values, (list, tuple)) and any(map(imagined, values))


def rewritten(func: Any) -> bool:
    """Whether an operator on DTensors has been given another meaning, as torch's loss_parallel() does."""
    return func in DTensor._op_dispatcher._custom_op_handlers
