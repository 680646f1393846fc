"""What a foreign program's distributed objects mean, in plain data. Beside comm/raw.py, the only file that looks into
torch.distributed, and it calls no collective: who the members of a group are, where a DTensor's shard sits, who I am.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # path segments that wrappers add
SHELLS = ("DistributedDataParallel", "DataParallel", "OptimizedModule", "DeepSpeedEngine", "FullyShardedDataParallel")

__all__ = ["DTensor", "FullyShardedDataParallel", "ShardedGradScaler", "box_of", "joined", "members", "world"]

ENGINE = re.compile(r"/(?:src|site-packages)/isograd/")  # isograd's own files
Box = tuple[tuple[int, int], ...]  # [start, stop] along each dimension


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """What this rank holds of a parameter that FSDP1 keeps in a flat one: some of its elements in a row, or none."""

    owner: Tensor  # what the optimizer was given: the flat parameter, or one that FSDP made for this piece
    local: Tensor
    grad: Tensor | None  # of these elements; None where it was not reduced yet
    held: Tensor | None  # what was accumulated so far, reduced or not
    whole: tuple[int, ...]
    box: tuple[tuple[int, int], ...] | None  # [start, stop] of the elements; None: all of them, on every rank

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self.owner.requires_grad


Held = Tensor | FlatPiece


def joined() -> bool:
    """Whether this process has joined a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def world() -> tuple[int, int]:
    """(rank, world size): of the joined world, else what a launcher promised, else a world of one."""
    if joined():
        return dist.get_rank(), dist.get_world_size()
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if placed() else (0, 1)


@lru_cache(maxsize=4096)
def _members_by_name(name: str, world_size: int) -> tuple[int, ...]:
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return tuple(dist.get_process_group_ranks(group))


def forget() -> None:
    """Groups' names begin again with a new world."""
    _members_by_name.cache_clear()


def issued() -> dict[str, int]:
    """'0,1' -> how many collectives the gloo groups of these members have issued here, by their own count: also those
    that no dispatch mode sees, in callbacks of other threads (PowerSGD's hook)."""
    found: dict[str, int] = {}
    for group in dist.distributed_c10d._world.pg_map if joined() else ():
        if dist.get_backend(group) == "gloo":
            key = ",".join(map(str, dist.get_process_group_ranks(group)))
            found[key] = found.get(key, 0) + group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return found


def placed() -> bool:
    """Whether this process knows its rank: it has joined a world, or its launcher told it."""
    return joined() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group that an operator received: as a name, or boxed for the dispatcher."""
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    try:
        return _members_by_name(group if isinstance(group, str) else group.group_name, dist.get_world_size())
    except (RuntimeError, ValueError, KeyError):
        return tuple(range(group.size())) if hasattr(group, "size") else ()


def flat(parameter: Tensor) -> bool:
    """Whether a parameter is FSDP1's flat one, of many joined into one."""
    return bool(getattr(parameter, "_is_flat_param", False))


def pieces(module: FullyShardedDataParallel) -> dict[str, FlatPiece]:
    """By name: what this rank holds of each parameter of one flat parameter."""
    handle: Any = module._handle
    flat_one = handle.flat_param
    sharded = handle.uses_sharded_strategy
    data = getattr(flat_one, "_local_shard", flat_one).detach() if sharded else flat_one.detach()
    found = {}
    rows = zip(flat_one._fqns, flat_one._shapes, flat_one._shard_param_infos, strict=True)
    for i, (name, shape, info) in enumerate(rows):
        first, size = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
        start = info.intra_param_start_idx if info.in_shard else 0
        owner = flat_one if flat_one._params is None else flat_one._params[i]
        if flat_one._params is None:
            held = flat_one.grad
            reduced = held is not None and held.numel() == data.numel()
            gradient = held[first : first + size] if held is not None and reduced else None
        else:
            held = gradient = owner.grad
            if gradient is not None and gradient.numel() != size:
                gradient = None
            if gradient is None and not size and flat_one.grad is not None:
                gradient = data[:0]  # another rank has the gradient
        local = data[first : first + size].detach()
        if not sharded:
            local, gradient = local.view(shape), gradient.view(shape) if gradient is not None else None
        box = ((start, start + size),) if sharded else None
        found[plain_name(name)] = FlatPiece(owner, local, gradient, held, tuple(shape), box)
    return found


def views(module: FullyShardedDataParallel) -> dict[str, Tensor]:
    """By name: the parameters of a flat one as they are in a forward, whole and in its graph."""
    flat_one: Any = module._handle.flat_param  # type: ignore[union-attr]
    found = {}
    for name, (leaf, child, _) in zip(flat_one._fqns, flat_one._param_infos, strict=True):
        value = getattr(child, leaf, None)
        if isinstance(value, Tensor) and value.grad_fn is not None:
            found[plain_name(name)] = value
    return found


def whole_shape(parameter: Held) -> tuple[int, ...]:
    """A parameter's shape before it was cut, as far as it says so itself."""
    if isinstance(parameter, FlatPiece):
        return parameter.whole
    shape = list(parameter.shape)  # of a DTensor: the global one
    if (cut := _cut_by_megatron(parameter)) is not None:
        shape[cut[0]] *= cut[2]
    return tuple(shape)


def _cut_by_megatron(parameter: Tensor) -> tuple[int, int, int] | None:
    """(dimension, rank, ranks) of a parameter that Megatron-Core has cut evenly, and marked so."""
    state = sys.modules.get("megatron.core.parallel_state")
    marked = getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_stride", 0) == 1
    if state is None or not marked or isinstance(parameter, DTensor):
        return None
    return (
        int(parameter.partition_dim),  # type: ignore[attr-defined]
        int(state.get_tensor_model_parallel_rank()),
        int(state.get_tensor_model_parallel_world_size()),
    )


def box_of(parameter: Held) -> tuple[tuple[int, int], ...] | None:
    """[start, stop] along each dimension of the global tensor, for what this rank holds; None when nothing says so."""
    if isinstance(parameter, FlatPiece):
        return parameter.box
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
    if (cut := _cut_by_megatron(parameter)) is not None:
        dim, rank, _ = cut
        own = parameter.shape[dim]
        return tuple((rank * own, (rank + 1) * own) if d == dim else (0, n) for d, n in enumerate(parameter.shape))
    contract = getattr(parameter, "_isograd_contract", None)
    if contract is not None and not contract.shards:
        return tuple((0, size) for size in contract.shape)
    return None


def unwrapped(module: torch.nn.Module) -> Any:
    """The user's model inside of modules that only wrap it ('module.' in front of every name)."""
    while type(module).__name__ in SHELLS:
        module = next(iter(module.children()))
    return module


def coefficients(module: torch.nn.Module) -> dict[str, float]:
    """What a transformers model's config tells of the balance loss that it uses: coefficient, number of experts."""
    config = getattr(module, "config", None)
    if getattr(config, "output_router_logits", False) is not True:
        return {}
    numbers = [getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    experts = next((number for number in numbers if number is not None), None)
    told = {"router_aux_loss_coef": getattr(config, "router_aux_loss_coef", None), "num_experts": experts}
    return {name: float(value) for name, value in told.items() if isinstance(value, float | int)}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def owner(parameter: Held) -> Tensor:
    """What an optimizer was given for it."""
    return parameter.owner if isinstance(parameter, FlatPiece) else parameter


def misplaced(parameter: Held, gradient: Tensor) -> bool:
    """Whether `placed_like` would have to communicate."""
    both = isinstance(gradient, DTensor) and isinstance(parameter, DTensor)
    return both and gradient.placements != parameter.placements  # type: ignore[attr-defined, union-attr]


def placed_like(parameter: Held, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, cut as its parameter is. DTensor leaves some gradients partial or whole until a
    step needs them; bringing them into place is what that step would do, and the only time the capture communicates."""
    if misplaced(parameter, gradient):
        with torch.no_grad():
            return gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()  # type: ignore
    return local(gradient)


def local(tensor: Held) -> Tensor:
    """This rank's part of a DTensor, without communication; a sparse gradient as a dense one; else as it is."""
    if isinstance(tensor, FlatPiece):
        return tensor.local
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.to_dense() if tensor.is_sparse else tensor


def offset(parameter: Held, part: Tensor, whole: tuple[int, ...] | None, whole_box: Box | None) -> int:
    """Where a shard starts in the flat tensor to which this rank contributed, else 0. `whole`: the shape of that, and
    `whole_box` where it stands itself if it is a part (FSDP2 over tensor parallel)."""
    if isinstance(parameter, FlatPiece):
        return parameter.box[0][0] if parameter.box is not None else 0
    box = box_of(parameter)
    if not whole or box is None or math.prod(whole) <= part.numel():
        return 0
    return (box[0][0] - (whole_box[0][0] if whole_box else 0)) * math.prod(whole[1:])


def imagined(values: Any) -> bool:
    """Whether tensors without contents are among some arguments: shapes are computed, and nothing else."""
    if isinstance(values, Tensor):
        return values.is_meta or isinstance(values, FakeTensor)
    return isinstance(values, (list, tuple)) and any(map(imagined, values))


def stepped(optimizer: Any) -> list[Tensor]:
    """The parameters that an optimizer has."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def frames() -> Iterator[FrameType]:
    """The calls that led to the function that asks, the innermost first."""
    return (frame for frame, _ in walk_stack(sys._getframe(2)))


def infers_shapes() -> bool:
    """Whether a schedule of torch's pipelining calls a stage, or the loss, to learn shapes and nothing else."""
    return any(frame.f_code.co_name.endswith(("_metadata_inference", "_shape_inference")) for frame in frames())


def functional() -> bool:
    """Whether a transform of torch.func (grad, vjp, vmap) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def rewritten(func: Any) -> bool:
    """Whether an operator on DTensors has been given another meaning, as torch's loss_parallel() does."""
    return func in DTensor._op_dispatcher._custom_op_handlers


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of sequences and dicts."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for v in inside for t in tensors_in(v)]


OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_CORPUS = os.path.join(OURS, "corpus")
_WRAPS = "typing_extensions.py"  # stands around functions of torch that are deprecated


def call_site(base: str) -> str:
    """'train.py:33 in step': the nearest frame that is neither torch's nor isograd's."""
    for frame in frames():
        file = frame.f_code.co_filename
        mine = (file.startswith(OURS) and not file.startswith(_CORPUS)) or ENGINE.search(file)
        if not (mine or file.startswith((TORCH, "<")) or "contextlib" in file or file.endswith(_WRAPS)):
            shown = os.path.relpath(file, base) if file.startswith(base) else os.path.basename(file)
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""
