"""The entrances of DeepSpeed's Ulysses, under its names and arguments, on isograd's exchange.

q, k and v travel in one exchange (sequence/ulysses.py). Nothing is registered with transformers: `initialize` cuts the
model that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import raw, world
from isograd.comm.group import Group
from isograd.comm.transport import is_of_torch
from isograd.core.mesh import Mesh
from isograd.integrations.deepspeed.settings import refuse
from isograd.integrations.world import mesh_for
from isograd.sequence import ulysses

LAYOUTS = {0: "sbhd", 1: "bshd"}  # gather_idx, the dimension of the sequence: the order of dimensions


class DistributedAttention(nn.Module):
    """`local_attention(q, k, v, ...)` over the whole sequence, of which each rank of the group has a part."""

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """sp_stream, num_kv_heads: taken, and not needed; one exchange carries all, and heads are counted."""
        super().__init__()
        if scatter_idx != 2 or gather_idx not in LAYOUTS:
            expected = "scatter_idx=2, the heads; gather_idx, the sequence: 0 for [s, b, h, d], 1 for [b, s, h, d]"
            refuse(f"scatter_idx={scatter_idx}, gather_idx={gather_idx}", expected)
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._group = sequence_process_group if isinstance(sequence_process_group, Group) else _group(self.spg)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """This rank's tokens of the result. batch_dim_idx, of newer versions: 1 for [s, b, h, d], else 0."""
        if type(batch_dim_idx) is not int:  # older versions have no such argument
            args = args if batch_dim_idx is None else (batch_dim_idx, *args)
        elif batch_dim_idx != 1 - self.gather_idx:
            refuse(f"batch_dim_idx={batch_dim_idx}, gather_idx={self.gather_idx}", "one of them 0, the other 1")
        if kwargs.pop("rotary_pos_emb", None) is not None:
            refuse("rotary_pos_emb", "positions that turn q and k before the exchange, or in local_attention")
        wrong = [tuple(t.shape) for t in (query, key, value) if t.dim() != 4]
        if wrong:
            refuse(f"tensors of shape {wrong}", f"four dimensions, {', '.join(LAYOUTS[self.gather_idx])}")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.local_attn(q, k, v, *args, **kwargs)

        return ulysses.attention(attend, query, key, value, self._group, LAYOUTS[self.gather_idx])


class SequenceGroups:
    """An mpu: the sequence groups, neighbours, and the data groups across them."""

    def __init__(self, mesh: Mesh) -> None:
        self.get_sequence_parallel_world_size = partial(mesh.size, "cp")
        self.get_sequence_parallel_rank = partial(mesh.index, "cp")
        self.get_sequence_parallel_group = lambda: mesh.group("cp").transport.process_group  # torch's
        self.get_data_parallel_world_size = partial(mesh.size, "dp")  # how many sequence groups there are
        self.get_data_parallel_rank = partial(mesh.index, "dp")


class UlyssesSPAttentionHF:
    """DeepSpeed's class, for its one class method."""

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str, sequence_parallel_size: int,
        micro_batch_size: int = 1, seq_length: int | None = None, seq_length_is_variable: bool = True,
        disable_in_eval: bool = False, max_length: int | None = None,
    ) -> SequenceGroups | None:  # fmt: skip
        """The mpu for `initialize(mpu=...)`, which cuts the model; None for a size of 1.

        All else is taken, and not needed: any head count and length is cut, with the model's own sdpa or eager."""
        if type(sequence_parallel_size) is not int or sequence_parallel_size < 1:
            refuse(f"sequence_parallel_size={sequence_parallel_size!r}", "a whole number from 1")
        if disable_in_eval:
            refuse("disable_in_eval=True", "the same layout in evaluation, of whole rows on every rank of a group")
        if sequence_parallel_size == 1:
            return None
        return SequenceGroups(mesh_for(f"cp{sequence_parallel_size}", "dp cp"))


class _Rows(dict[str, Any]):
    """A batch of whole rows."""

    def __missing__(self, name: str) -> Any:
        if name == "shift_labels":
            refuse('batch["shift_labels"]', "loss = engine(**batch).loss; engine.backward(loss)")
        raise KeyError(name)


class UlyssesSPDataLoaderAdapter:
    """Each rank's loader has batches of its own; a sequence group computes them one after the other, all ranks each.

    DeepSpeed's adapter gives every rank its part of the rows. This one gives it whole rows, which `engine(**batch)`
    cuts, with the labels: a length that the ranks do not divide is no error, and no label is lost at a cut."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any = None) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.device = device

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[_Rows]:
        own, group = iter(self.dl), _group(self.sp_group)
        while True:
            raised: Exception | None = None
            try:
                batch = next(own, None)
                if odd := [name for name, value in (batch or {}).items() if not isinstance(value, Tensor)]:
                    refuse(f"a batch whose {odd} are no tensors", "tensors alone")
            except Exception as error:
                batch, raised = None, error
            of_all = _of_all(batch, "" if raised is None else f"{type(raised).__name__}: {raised}", group)
            if raised is not None:
                raise raised
            if failed := {rank: said for rank, said in enumerate(of_all) if isinstance(said, str)}:
                refuse(f"a loader that raised, by sequence rank: {failed}", "batches, or the end, on every rank")
            if any(batch is None for batch in of_all):
                ended = [rank for rank, batch in enumerate(of_all) if batch is None]
                if len(ended) < len(of_all):
                    refuse(f"loaders of sequence ranks {ended} that ended before the others", "as many batches each")
                return
            for batch in (one for one in of_all if isinstance(one, dict)):
                yield _Rows({name: value.to(self.device) for name, value in batch.items()})


def _of_all(batch: Mapping[str, Tensor] | None, failed: str, group: Group) -> list[dict[str, Tensor] | str | None]:
    """The batch of every rank of a group; None of one whose loader has ended, a text of one that raised."""
    found = {} if batch is None else dict(batch)
    about = [[name, str(value.dtype)[6:], list(value.shape)] for name, value in found.items()]
    head = torch.frombuffer(
        bytearray(json.dumps(failed or (None if batch is None else about)).encode()), dtype=torch.uint8
    )
    rows = [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in found.values()]
    flat = torch.cat([head, *rows]).to(world.device())
    sizes = raw.gather_list(torch.tensor([len(head), len(flat)], device=flat.device), group)
    padded = torch.cat([flat, flat.new_zeros(int(max(size[1] for size in sizes)) - len(flat))])
    return [_batch(one.cpu(), int(size[0])) for one, size in zip(raw.gather_list(padded, group), sizes, strict=True)]


def _batch(flat: Tensor, head: int) -> dict[str, Tensor] | str | None:
    about = json.loads(bytes(flat[:head].numpy()))
    if about is None or isinstance(about, str):
        return about
    found = {}
    for name, kind, shape in about:
        dtype = getattr(torch, kind)
        stop = head + dtype.itemsize * torch.Size(shape).numel()
        found[name] = flat[head:stop].clone().view(dtype).reshape(shape)
        head = stop
    return found


def _group(process_group: Any) -> Group:
    """A process group of torch's as a group of isograd's."""
    if not is_of_torch(process_group):
        refuse(f"{process_group!r} as sequence_process_group", "a process group of torch.distributed")
    return world.group_of_torch(process_group, "cp")
