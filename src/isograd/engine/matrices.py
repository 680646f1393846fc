"""Whole matrices for optimizers that work on matrices and not on elements: Muon, Shampoo, SOAP.

A row shard of a matrix has other singular vectors than the matrix: such an optimizer would step it wrongly and say
nothing. Matrices named by `Engine(whole=[...])` therefore have one data rank each that owns all of their rows. The
experts of a layer are a stack of matrices, of which a row is an expert's: any cut by rows leaves each with one owner.
Nothing else changes: gradients are sent to the owners of rows and parameters come back from them, by the same moves,
and each matrix is stepped once instead of on every rank. Of a matrix that tp cuts, the owner is a group of tp ranks, of
which one steps the whole (engine/across.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from isograd.contract import Record, Table
from isograd.engine.joined import Joined
from isograd.engine.plan import Slot
from isograd.errors import EngineError
from isograd.mesh import DATA, Mesh

BY_MATRIX = ("muon", "shampoo", "soap")  # in the name of an optimizer's class


def owners(table: Table, mesh: Mesh, patterns: Sequence[str]) -> dict[str, int | None]:
    """Which data rank owns each trainable matrix (2 dims) whose name matches: the largest first, to who has least. Of a
    stack of matrices, None: its rows are cut as ever.

    A function of names and shapes, so that all ranks agree. A matrix tied to another pipeline stage, which has other
    matrices beside it, goes where its name says.
    """
    trained = [record for record in table if record.parameter.requires_grad]
    matrices = [record for record in trained if record.parameter.dim() == 2 + record.contract.stacked]
    chosen = [r for r in matrices if any(fnmatchcase(r.name, pattern) for pattern in patterns)]
    idle = [p for p in patterns if not any(fnmatchcase(record.name, p) for record in chosen)]
    if idle and mesh.size("pp") == 1:
        raise EngineError(
            "IG528",
            "patterns of whole matrices match nothing",
            seen=f"whole={list(patterns)}; without a matrix: {idle}",
            expected=f"shell-style patterns of names of trainable matrices, such as {[r.name for r in matrices][:3]}",
            where=mesh.where(),
        )
    apart = [record for record in chosen if record.contract.shards and not record.contract.stacked]
    cut = [r.name for r in apart if [shard.axis for shard in r.contract.shards] != ["tp"]]
    if cut:
        raise EngineError(
            "IG529",
            "matrices that were to stay whole are cut over more than tp",
            seen=f"{cut[:4]}{' ...' if len(cut) > 4 else ''} under {str(mesh.layout)!r}",
            expected="matrices of which the tp ranks have all rows and columns",
            fix="a layout without these axes, AdamW, or whole= patterns that leave these out",
            where=mesh.where(),
        )
    group = mesh.group(DATA)
    loads = [0] * group.size
    found: dict[str, int | None] = {record.name: None for record in chosen if record.contract.stacked}
    chosen = [record for record in chosen if not record.contract.stacked]
    for record in sorted(chosen, key=lambda r: (-_size(r), r.name)):
        tied = bool(record.contract.ties)
        owner = zlib.crc32(record.name.encode()) % group.size if tied else loads.index(min(loads))
        loads[owner] += _size(record)
        found[record.name] = owner
    return found


def _size(record: Record) -> int:
    """Of the whole matrix, on which all tp ranks agree."""
    return math.prod(record.contract.shape)


def refuse_pieces(optimizer: torch.optim.Optimizer, slots: Mapping[int, Slot], *, by_rows: bool) -> None:
    """`slots`: of each tensor (by id) that may be stepped. `by_rows`: owners step their rows only."""
    for member in optimizer.optimizers if isinstance(optimizer, Joined) else (optimizer,):
        kind = type(member).__name__
        if not any(word in base.__name__.lower() for base in type(member).__mro__ for word in BY_MATRIX):
            continue
        stepped = [p for group in member.param_groups if group.get("use_muon", True) for p in group["params"]]
        for slot in (slots[id(p)] for p in stepped if id(p) in slots):
            if not slot.whole and (slot.contract.shards or (by_rows and slot.cut_by_rows)):
                raise EngineError(
                    "IG531",
                    f"{kind} needs whole matrices and was given pieces",
                    seen=f"{slot.name!r}, cut {'over tp' if slot.contract.shards else 'by rows over the data ranks'}",
                    expected="matrices that one data rank owns whole",
                    fix=f"Engine(..., whole=['blocks.*']) and ig.Joined({kind}(shards.whole), AdamW(shards.rest)), "
                    "where the optimizer is made",
                )
