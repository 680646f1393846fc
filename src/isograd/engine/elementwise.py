"""Which optimizers may step rows: those that step each element by itself. Which may step matrices: whole ones.

From ZeRO 1 on a rank's optimizer sees its rows of each parameter, and under tp its part of a cut one. Adam computes for
an element what it would compute in the whole tensor. Adafactor, LAMB and LARS take a mean or norm of whatever tensor
they are given, and would silently train otherwise: they step whole parameters, or matrices that one rank owns
(`Engine(matrices=[...])`). Torch's own elementwise optimizers are listed. Of any other class the user says so:
`Engine(..., elementwise=True)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import optim

from isograd.engine import muon
from isograd.engine.plan import Slot
from isograd.errors import EngineError

KNOWN = {
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
}  # fmt: skip


def refuse_pieces(
    optimizer: torch.optim.Optimizer, slots: Mapping[int, Slot], *, by_rows: bool, elementwise: bool
) -> None:
    """`slots`: of each tensor (by id) that may be stepped. `by_rows`: owners step their rows only. `elementwise`: what
    the user says of optimizers that are not in the list."""
    for member in muon.members(optimizer):
        closure = inspect.signature(type(member).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise EngineError("IG543", kind=type(member).__name__)
        kind, bases = type(member).__name__, [base.__name__.lower() for base in type(member).__mro__]
        by_matrix = any(word in base for base in bases for word in muon.BY_MATRIX)
        groups = [g["params"] for g in member.param_groups if not by_matrix or g.get("use_muon", True)]
        stepped = [slots[id(p)] for params in groups for p in params if id(p) in slots]
        pieces = [s for s in stepped if not is_whole(s, by_rows) and not (by_matrix and s.uncut_matrix)]
        if pieces and by_matrix:
            how = "over tp" if pieces[0].contract.shards else "by rows over the data ranks"
            raise EngineError("IG531", kind=kind, name=pieces[0].name, how=how)
        if pieces and not elementwise and type(member) not in KNOWN:
            raise EngineError(
                "IG542",
                f"{kind} is not known to be elementwise, so it cannot step {'ZeRO shards' if by_rows else 'parts'}",
                seen=f"{type(member).__module__}.{kind}; each rank steps a part of {pieces[0].name!r}",
                expected="torch's elementwise optimizers (AdamW, SGD, ...), or whole parameters: zero0, matrices=[...]",
                fix=f"elementwise=True, where the engine is made, if {kind} takes no norm, mean or block of a tensor; "
                "else zero0 without tp and ep",
            )


def is_whole(slot: Slot, by_rows: bool) -> bool:
    """Whether a rank that steps this parameter steps all of it. A stack of matrices may be cut between them."""
    matrix = slot.uncut_matrix and slot.parameter.dim() == 2
    return matrix or not (slot.contract.shards or (by_rows and slot.owners.size > 1))
