"""Chunks of a tower's rows for GradientCache: cutting the inputs, encoding a chunk twice with the same random draws,
and keeping the graphs of as many chunks as fit into a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as tree

from isograd.engine.batches import call
from isograd.errors import ContrastiveError

Encode = Callable[..., Any]

_PARTS = {  # of the layouts whose tensors have no storage of their own
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("offsets", "values"),
}


def rows_of(inputs: Any) -> int:
    """The number of rows of a tensor, or of the tensors in a dict, tuple or list, which must agree."""
    rows = {len(t) for t in tree.tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()}
    if len(rows) != 1:
        raise ContrastiveError("IG961", seen=sorted(rows))
    return rows.pop()


def cut(inputs: Any, first: int, rows: int) -> Any:
    """Rows `first` to `first + rows` of every tensor in `inputs`. Scalars and other values are passed on unchanged."""
    return tree.tree_map(lambda t: t[first : first + rows] if isinstance(t, Tensor) and t.dim() else t, inputs)


def encode_chunk(encode: Encode, inputs: Any) -> Tensor:
    """The encoder's vectors [rows, d] of a chunk. An empty chunk is encoded as one row of ones whose vector is dropped:
    few models accept an empty batch."""
    rows = rows_of(inputs)
    vectors = call(encode, inputs if rows else tree.tree_map(_ones, inputs))
    if not isinstance(vectors, Tensor) or vectors.dim() != 2 or len(vectors) != max(1, rows):
        shape = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ContrastiveError(
            "IG962",
            "an encoder that does not return one vector per row",
            seen=f"{shape} for {max(1, rows)} rows",
            expected="a tensor [rows, d]",
            fix="give encode=lambda **inputs: pool(model(**inputs)), a function of a chunk",
        )
    return vectors[:rows]


def place_rows(whole: Tensor, first: int, vectors: Tensor) -> None:
    """Write a chunk's vectors into the tower's, from row `first` on."""
    if vectors.shape[1] != whole.shape[1]:
        raise ContrastiveError(
            "IG962",
            "an encoder whose vectors have another length for another chunk",
            seen=f"{vectors.shape[1]} numbers for a row, and {whole.shape[1]} in the tower's first chunk",
            expected="tensors [rows, d] of one d for all rows of a tower",
        )
    whole[first : first + len(vectors)] = vectors


@dataclass(frozen=True)
class Budget:
    """Bytes that the graphs of chunks may hold until their backward, beside what is in memory anyway: parameters,
    buffers and the towers' inputs. Several chunks may hold the same storage; it is counted with the first of them."""

    left: float
    free: frozenset[Hashable] = frozenset()  # storages that count no more

    @staticmethod
    def of(megabytes: float, model: nn.Module, inputs: Any) -> Budget:
        """What there is before the first chunk."""
        present = [*model.parameters(), *model.buffers(), *tree.tree_leaves(inputs)] if megabytes else []
        free = frozenset(key for x in present if isinstance(x, Tensor) for key in _storages(x))
        return Budget(megabytes * 2**20, free)

    def encode_kept(self, encode: Encode, inputs: Any) -> tuple[Tensor, bool, Budget]:
        """The encoder's vectors of a chunk, with its graph, whether that fits, and what is left. When one does not fit,
        none is kept after it: the next one would need the memory that this one needed in vain."""
        held: dict[Hashable, int] = {}

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            held.update((key, size) for key, size in _storages(tensor).items() if key not in self.free)
            return tensor, tensor._version

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            vectors = encode_chunk(encode, inputs)
        fits = sum(held.values()) <= self.left
        return vectors, fits, Budget(self.left - sum(held.values()) if fits else 0.0, self.free | held.keys())


@torch.no_grad()
def _storages(tensor: Tensor) -> dict[Hashable, int]:
    """The storages that hold a tensor's numbers, and their bytes. A weak reference stays different from those of all
    later storages, while the address of a storage is used again as soon as it is freed."""
    if tensor.is_mkldnn:  # it shows no storage
        return {object(): tensor.numel() * tensor.element_size()}
    parts = [getattr(tensor, name)() for name in _PARTS[tensor.layout]] if tensor.layout in _PARTS else [tensor]
    return {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in parts}


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Autograd checks this only of what passes through no hooks."""
    tensor, version = packed
    if tensor._version != version:
        raise ContrastiveError(
            "IG972", seen=f"a tensor of {tuple(tensor.shape)} at version {tensor._version}, kept at version {version}"
        )
    return tensor


def _ones(x: Any) -> Any:
    return x.new_ones((1, *x.shape[1:])) if isinstance(x, Tensor) and x.dim() else x


@contextmanager
def one_kernel() -> Iterator[None]:
    """Turn off the fast path of nn.TransformerEncoderLayer: without a graph, it uses kernels that round otherwise."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def upcast(x: Tensor) -> Tensor:
    """Losses are computed in fp32, or in fp64 for fp64 vectors."""
    return x if x.dtype == torch.float64 else x.float()
