"""The one gather of a step: what every rank must know to decide as all others do.

Each rank sends a few numbers (its weight, its loss, what is wrong with it, how many backwards sent their gradients,
what its layers found wrong in their input) and one bit per parameter: whether a backward reached it. Every decision of
the step is taken from this table, which is the same on all ranks, so ranks refuse, skip or step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import Timer

import numpy as np
import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.notes import gather_notes
from isograd.engine.flights import PATIENCE
from isograd.engine.ledger import Ledger
from isograd.engine.plan import Plan
from isograd.engine.shares import Mean
from isograd.errors import EngineError
from isograd.mesh import STAGE, Mesh


class Status(IntEnum):
    """How the step stands on one rank."""

    FINE = 0
    FAILED = 1  # a backward failed, or something that only this rank can see is wrong
    DISCARDS = 2  # this rank drops the step
    BEGINS = 3  # not at its end: it announces the weights of its terms
    SPOILED = 4  # the optimizer raised in an earlier step: no step is right until a checkpoint is loaded
    SAVES = 5  # between two steps: a checkpoint is saved


@dataclass(frozen=True)
class Totals:
    """Equal on all ranks, but for `unused`."""

    loss: float
    weight: float
    unsent: bool  # some rank holds gradients that have not left
    unused: set[str]  # parameters of this rank that no rank used
    loss_scale: float
    losses: Tensor  # weighted, one per rank
    terms: dict[str, Mean]


@dataclass(frozen=True)
class Table:
    """A row per rank of the world."""

    weight: Tensor
    loss: Tensor
    pending: Tensor
    status: Tensor
    passes: Tensor
    settings: Tensor  # a digest of what the optimizer's groups are set to
    more: Tensor  # [ranks, further columns]
    used: Tensor  # bool [ranks, parameters]; stages of a pipeline have different ones


HEAD = 6  # columns of every table
SAME_LOSS = 1e-3  # relative: ranks of a tp group compute one loss from the same numbers; devices of two kinds may round
BITS = 48


def gather(
    ledger: Ledger,
    status: Status,
    loss: Tensor,
    more: Tensor,
    width: int,
    device: torch.device,
    settings: int = 0,
) -> Table:
    """`width`: of the widest stage's list of parameters, so that all rows have one length."""
    told = ledger.told
    known = [float(ledger.pending()), float(status), float(ledger.passes), float(settings)]
    head = torch.cat(
        [
            torch.as_tensor(told.weight, dtype=torch.float64, device=device).reshape(1),
            loss.to(device).reshape(1),
            torch.tensor(known, dtype=torch.float64, device=device),
            more.to(device, torch.float64),
        ]
    )
    used = packed([slot in ledger.used for slot in ledger.plan.slots], width).to(device)
    waiting = Timer(PATIENCE, _raise, [ledger.flights.flags])  # a rank in a further backward waits for this one
    waiting.daemon = True
    waiting.start()
    try:
        rows = torch.stack(raw.gather_list(torch.cat((head, used)), ledger.mesh.group("world"))).cpu()
    finally:
        waiting.cancel()
    weight, losses, pending, states, passes, digests = rows[:, :HEAD].unbind(1)
    further, bits = rows[:, HEAD : len(head)], unpacked(rows[:, len(head) :], width)
    return Table(weight, losses, pending, states, passes, digests, further, bits)


def _raise(flags: Sequence[str]) -> None:
    for flag in flags:
        raw.raise_flag(flag)


def packed(flags: Sequence[bool], width: int) -> Tensor:
    """Flags as whole numbers of BITS bits, which float64 holds exactly. `width`: flags that are not there are False."""
    bits = np.zeros(-(-width // BITS) * BITS, dtype=np.int64)
    bits[: len(flags)] = flags
    return torch.from_numpy((bits.reshape(-1, BITS) << np.arange(BITS)).sum(1)).double()


def unpacked(numbers: Tensor, width: int) -> Tensor:
    """[ranks, numbers] -> bool [ranks, width]."""
    bits = numbers.long().numpy()[:, :, None] >> np.arange(BITS) & 1
    return torch.from_numpy(bits.reshape(len(numbers), -1)[:, :width].astype(bool))


def refuse_failed(table: Table, ledger: Ledger, problem: str | None, quiet: bool) -> None:
    """All ranks together: when one of them failed or drops the step, all do. `quiet`: this rank asked for it."""
    mesh, begins, saves = ledger.mesh, table.status == Status.BEGINS, table.status == Status.SAVES
    if bool(saves.any()):
        if not bool(saves.all()):
            raise _saved_apart(saves.nonzero().flatten().tolist(), mesh)
        return
    if bool((begins | (table.status == Status.FINE)).all()):
        if bool(begins.any()) and not bool(begins.all()):
            raise _begun_apart(begins.nonzero().flatten().tolist(), mesh)
        return
    reasons = gather_notes(problem or ledger.failure, mesh.group("world"), mesh.device)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if quiet:
        return
    spoiled = (table.status == Status.SPOILED).nonzero().flatten().tolist()
    if spoiled:
        ledger.spoiled = ledger.spoiled or f"learned of it from rank {spoiled[0]}"
        raise EngineError(
            "IG559",
            "an optimizer raised in an earlier step",
            seen="; ".join(f"rank {rank}: {failed[rank]}" for rank in spoiled),
            expected="optimizers that step on every rank, or on none: what raised may have changed half of the "
            "parameters, and those of other ranks have changed",
            fix="load parameters and optimizer on all ranks, by Keeper.load or accelerator.load_state; or end",
            where=mesh.where(),
        )
    if failed:
        raise EngineError(
            "IG550",
            f"the step is refused on all ranks: rank {', '.join(map(str, failed))} failed in it",
            seen="; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items()),
            expected="every backward of a step to end well on every rank",
            fix="nothing of the step is left, on any rank: continue with the next batch, or stop",
            where=mesh.where(),
        )
    ranks = (table.status == Status.DISCARDS).nonzero().flatten().tolist()
    raise EngineError(
        "IG558",
        "the step was discarded by another rank",
        seen=f"engine.discard() on ranks {ranks}, engine.step() or engine.grads() here",
        expected="all ranks to discard a step, or none",
        fix="nothing of the step is left, on any rank: continue with the next batch",
        where=mesh.where(),
    )


def _saved_apart(saves: list[int], mesh: Mesh) -> EngineError:
    return EngineError(
        "IG555",
        "some ranks save a checkpoint while others do not",
        seen=f"a checkpoint on ranks {saves}; engine.step(), grads() or discard() on the others",
        expected="all ranks to save, between the same two steps: each writes its own rows",
        fix="take the saving out of 'if rank == 0:'; nothing of the step is left, on any rank",
        where=mesh.where(),
    )


def _begun_apart(begins: list[int], mesh: Mesh) -> EngineError:
    return EngineError(
        "IG566",
        "some ranks begin a step of several terms while others are at the end of theirs",
        seen=f"engine.begin, or the first backward of terms, on ranks {begins}; step() or grads() on the others",
        expected="engine.begin on every rank: a rank without anything of a term announces 0",
        fix="call engine.begin on all ranks before the first backward of a step, with 0 where there is nothing",
        where=mesh.where(),
    )


def refuse_parted(table: Table, steps: Tensor, ledger: Ledger) -> None:
    """All ranks together: optimizers that step each rank's own copy have stepped equally often, or one has raised."""
    if bool((steps != steps[0]).any()) and not bool((table.status == Status.SPOILED).any()):
        counted = ", ".join(f"rank {rank}: {int(count)}" for rank, count in enumerate(steps))
        ledger.spoiled = ledger.spoiled or f"optimizers have stepped unequally often ({counted})"
        raise EngineError(
            "IG559",
            "an optimizer has stepped on some ranks only: copies of the parameters differ",
            seen=f"steps of {counted}",
            expected="a step on every rank, or on none: an exception between backward and step ends it on one alone",
            fix="load a checkpoint on all ranks (accelerator.load_state), or end; catch an exception where it arises",
            where=ledger.mesh.where(),
        )


def refuse_wrong(table: Table, mesh: Mesh) -> None:
    """Raised alike on all ranks, from the same table."""
    bad = (~(table.weight >= 0)).nonzero().flatten().tolist()
    if bad:
        raise EngineError(
            "IG515",
            f"the weight of a loss is negative or NaN on rank {', '.join(map(str, bad))}",
            seen=f"sums of weights {[float(table.weight[rank]) for rank in bad]}",
            expected="the number of tokens (rows, ...) the loss is the mean of; 0 for a rank without any",
            where=mesh.where(),
        )
    groups = mesh.everyone("tp")
    weights, losses = table.weight[groups], table.loss[groups]
    peers = _first(groups, weights != weights[:, :1])
    if peers:
        raise EngineError(
            "IG516",
            "ranks of one tp group were given different batches",
            seen=f"weights {table.weight[peers].tolist()} on ranks {peers}",
            expected="the same sequences on every rank of a tp or cp group: only dp ranks see different ones",
            fix="index the data by mesh.index('dp'), not by the global rank",
            where=mesh.where(),
        )
    peers = _first(groups, (losses - losses[:, :1]).abs() > SAME_LOSS * losses.abs().amax(1, keepdim=True))
    if peers:
        raise EngineError(
            "IG547",
            "ranks of one tp group have different losses of one batch",
            seen=f"sums of losses {table.loss[peers].tolist()} on ranks {peers}",
            expected="the whole loss on every rank of a tp group, computed in the same way",
            fix="scale, mask or add to the loss alike on all ranks of a tp group",
            where=mesh.where(),
        )
    groups = mesh.everyone(STAGE)
    settings, passes = table.settings[groups], table.passes[groups]
    stage = _first(groups, settings != settings[:, :1])
    if stage:
        unlike = [rank for rank in stage if table.settings[rank] != table.settings[stage[0]]]
        raise EngineError(
            "IG548",
            "the optimizers of ranks that train one model are set differently",
            seen=f"lr, decay or another number of a group on ranks {unlike} is not that of rank {stage[0]}",
            expected="equal groups on all ranks, which step copies or rows of the same parameters",
            fix="drive schedules by what all ranks share: stats.loss of engine.step(), not a rank's own loss",
            where=mesh.where(),
        )
    stage = _first(groups, passes != passes[:, :1])
    if stage:
        raise EngineError(
            "IG554",
            "data ranks ran different numbers of backwards that reduce gradients",
            seen=", ".join(f"rank {rank}: {int(table.passes[rank])}" for rank in stage),
            expected="as many synced backwards on every data rank",
            fix="backward of an empty batch with weight=0, engine.no_sync() but for the last, train_step(), or "
            "Engine(..., overlap=False), which lets numbers differ",
            where=mesh.where(),
        )


def _first(groups: Tensor, apart: Tensor) -> list[int]:
    """The first group of which a member is apart from the first member; none if all agree."""
    found: list[list[int]] = groups[apart.any(1)].tolist()
    return found[0] if found else []


def used_anywhere(table: Table, plan: Plan, mesh: Mesh) -> Tensor:
    """Bool per parameter of this rank: whether any part of it was used by a rank of its stage, or by a stage that it is
    tied to. (An expert that got no token is stepped as one device steps it, which has all experts in one tensor.)"""
    mine = table.used[list(mesh.layout.ranks(STAGE, mesh.rank)), : len(plan.slots)].any(0)
    for axes in sorted({axes for slot in plan.slots for axes in slot.contract.ties}):
        tied = sorted((s.name, i) for i, s in enumerate(plan.slots) if axes in s.contract.ties)
        places = [i for _, i in tied]
        counts = raw.all_reduce(mine[places].to(mesh.device, torch.float64), mesh.group(axes), control=True)
        mine[places] = counts.cpu() > 0
    return mine
