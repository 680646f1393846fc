"""The one gather of a step: what all ranks decide together from, and the one number that divides gradients.

Each rank sends a few numbers (its weight, its loss, what is wrong with it, how many backwards sent their gradients,
what its layers found wrong in their input) and one bit per parameter: whether a backward reached it. Every decision of
the step is taken from this table, which is the same on all ranks, so ranks refuse, skip or step together.

The table travels from host to host. Weights, losses and inputs that lie on cards are not looked at here (`Late`): they
travel beside the norm of the step, behind its reductions, and are read with it. So the host waits once for a card.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm import world as comm_world
from isograd.comm.consensus import all_gather_object
from isograd.core.mesh import DATA, STAGE, Mesh
from isograd.engine.grad_placeholder import changed_by_hand
from isograd.engine.plan import Plan
from isograd.engine.step import StepState
from isograd.engine.term_weights import Mean, TermWeights, number_on
from isograd.engine.tree import tree_sum
from isograd.errors import CommError, EngineError, IsogradError, headline


class Status(IntEnum):
    """How the step stands on one rank."""

    FINE = 0
    FAILED = 1  # a backward failed, or something that only this rank can see is wrong
    DISCARDS = 2  # this rank drops the step
    BEGINS = 3  # not at its end: it announces the weights of its terms
    INCONSISTENT = 4  # the optimizer raised in an earlier step: no step is right until a checkpoint is loaded
    SAVES = 5  # between two steps: a checkpoint is saved
    EVALUATES = 6  # not at its end: an evaluation ends
    OPENS = 7  # a folder of checkpoints, perhaps to load one
    READS = 8  # not at its end: its gradients are looked at


@dataclass(frozen=True)
class StepTotals:
    """Equal on all ranks."""

    loss: float
    weight: float
    loss_scale: float
    norm: float  # of the sums of gradients; NaN where nobody asked
    losses: Tensor  # weighted, one per rank
    terms: dict[str, Mean]

    @property
    def scale(self) -> float:
        """The one division: what makes gradients of sums those of the mean loss."""
        return 1.0 / (self.weight * self.loss_scale)


@dataclass(frozen=True)
class StepStatus:
    """How the step stands, a row per rank of the world. Equal on all ranks; what they decide is a function of it."""

    weight: Tensor
    loss: Tensor
    pending: Tensor
    status: Tensor
    synced_backwards: Tensor
    settings: Tensor  # a digest of what the optimizer's groups are set to
    note: Tensor  # of a rank that discards, 1: it handles no exception; that looks at a gradient: a digest of the name
    more: Mapping[str, Tensor]  # [ranks, columns] of what the caller sent under this name
    used: Tensor  # bool [ranks, parameters]; stages of a pipeline have different ones
    late: Late | None = None  # what of this is zeros here, as it lies on cards

    def ranks(self, status: Status) -> list[int]:
        """Those with this status."""
        found: list[int] = np.flatnonzero(self.status.numpy() == status).tolist()
        return found


@dataclass(frozen=True)
class Late:
    """What a rank says from its card. No host has looked at it: it travels beside the norm, and is read with it."""

    mine: Tensor  # float64, on the card: weight, loss, and what of the columns lies there
    complete: Callable[[Tensor], StepStatus]  # the whole table, of all ranks' rows of it in host memory


# All ranks, or none:
TOGETHER = {Status.SAVES: "save a checkpoint", Status.EVALUATES: "evaluate", Status.OPENS: "open a folder"}
SAME = {**TOGETHER, Status.READS: "look at gradients"}  # that, too, though a step that failed is refused in it
SAME_LOSS = 1e-3  # relative: ranks of a tp group compute one loss from the same numbers; devices of two kinds may round
BITS = 48


def gather_step_status(
    step_state: StepState,
    status: Status,
    wrong: EngineError | None,
    more: Mapping[str, Tensor],
    decide: Callable[[StepStatus], None],
    drop: Callable[[], None],
    loss: Tensor | float = 0.0,
    settings: int = 0,
    *,
    look: str = "",
    may_be_late: bool = False,
) -> StepStatus:
    """The gather of a step, and what all ranks do about it. Where any rank failed, discards or was given wrong input,
    the step is dropped on all ranks; all but those that discard raise.

    wrong: found on this rank alone. decide: refuses, alike on all ranks, what else is wrong with a step that no rank
    has failed in. look: the name of the gradient that is looked up. may_be_late: weights and losses are perhaps
    on cards, and the caller completes and decides the table.
    """
    problem = step_state.optimizer_inconsistent or (
        step_state.now.phase.failure if wrong is None else str(wrong).splitlines()[0]
    )
    if step_state.optimizer_inconsistent and status not in (Status.DISCARDS, Status.OPENS):
        status = Status.INCONSISTENT
    elif problem is not None and status not in (Status.DISCARDS, *TOGETHER):
        status = Status.FAILED
    note = crc32(look.encode()) if look else status is Status.DISCARDS and sys.exception() is None
    table = gather(step_state, status, loss, settings, note, more, may_be_late)
    discard = table.ranks(Status.DISCARDS)
    if discard and status is not Status.DISCARDS and any(table.note[discard].tolist()):
        step_state.left_by_others.add(step_state.now.ended + 1)
    gave_up = table.ranks(Status.FAILED) + discard
    closes = step_state.mesh.on_cards and step_state.mesh.layers_wait and 0 < len(gave_up) < len(table.status)
    if closes:  # their kernels wait for messages of a layer that these ranks will not send
        drop = partial(
            comm_world.leave, f"ranks {gave_up} gave up a step in which layers wait for each other", tell=False
        )
    with refusing(step_state, drop, wrong):
        engines = table.more["engine"].tolist()
        other = [rank for rank, number in enumerate(engines) if number != engines[0]]
        if other and len(discard) < len(table.status):
            raise EngineError("IG555", where=step_state.mesh.describe_rank(), does="call another Engine", found=other)
        refuse_parted(table, step_state)
        refuse_failed(table, step_state, problem, status is Status.DISCARDS)
        if status is Status.READS and bool((table.note != table.note[0]).any()):
            looks = dict(enumerate(all_gather_object(look, step_state.mesh)))
            seen = f"names that are looked up, by rank ('': engine.grads() itself): {looks}"
            does = f"look at the gradient of {max(looks.values())!r}"
            raise EngineError("IG555", seen=seen, where=step_state.mesh.describe_rank(), does=does)
        if table.late is not None:  # what hosts know, before the reductions; zeros in the place of the rest are right
            refuse_wrong(table, step_state.mesh)
        elif status not in (Status.DISCARDS, *TOGETHER):
            decide(table)
    if status is Status.DISCARDS:
        drop()
        if closes:
            raise CommError("IG214", seen="engine.discard() on some ranks", where=step_state.mesh.describe_rank())
    return table


@contextmanager
def refusing(step_state: StepState, drop: Callable[[], None], wrong: EngineError | None = None) -> Iterator[None]:
    """All ranks together: what is raised in here drops the step. `wrong`: found on this rank, and raised instead."""
    try:
        yield
    except IsogradError as refusal:
        drop()
        error = wrong or refusal
        step_state.mark_discarded(error)
        raise error from None


def gather(
    step_state: StepState,
    status: Status,
    loss: Tensor | float,
    settings: int,
    note: float,
    more: Mapping[str, Tensor],
    may_be_late: bool,
) -> StepStatus:
    """A row of every rank: one message of a few numbers and bits, from host to host, on connections of its own."""
    mesh, sums = step_state.mesh, [step_state.now.weight, loss]
    more = {"losses": step_state.now.kinds_of_losses(), **more}
    if may_be_late and status in (Status.FINE, Status.READS):  # on all ranks alike, whatever they were given
        sums = [number_on(mesh.device, number) for number in sums]
    numbers = [step_state.now.pending(), status, step_state.now.synced_backwards, settings, note]
    numbers.append(step_state.reducer.serial)
    known = torch.tensor(list(map(float, numbers)), dtype=torch.float64)
    used = packed([slot in step_state.now.used for slot in step_state.plan.slots], step_state.widest)
    heads = [torch.as_tensor(number, dtype=torch.float64).reshape(1) for number in sums]
    says = [*heads, known, used, *(part.double() for part in more.values())]
    sizes, on_cards = [len(part) for part in says], [part for part in says if part.is_cuda]
    mine = torch.cat([torch.zeros(part.shape, dtype=part.dtype) if part.is_cuda else part for part in says])
    gives_up = status in (Status.FAILED, Status.DISCARDS)  # cards of others may wait for it in a layer, for ever
    limit = raw.LAYER_S if gives_up and mesh.on_cards and mesh.layers_wait else None
    rows = raw.gather(mine, step_state.status_group, limit=limit)

    def table(late: Late | None) -> StepStatus:
        weights, losses, numbers, used, *columns = rows.split(sizes, dim=1)
        pending, states, synced_backwards, digests, notes, engines = numbers.T
        return StepStatus(
            weights[:, 0], losses[:, 0], pending, states, synced_backwards, digests, notes,
            {**dict(zip(more, columns, strict=True)), "engine": engines},
            unpacked(used, step_state.widest), late,
        )  # fmt: skip

    def complete(arrived: Tensor) -> StepStatus:
        rows[:, torch.cat([torch.full((len(part),), part.is_cuda) for part in says])] = arrived
        return table(None)

    # Where a rank begins, fails or discards, what is on cards decides nothing.
    return table(Late(torch.cat(on_cards), complete) if on_cards and status in (Status.FINE, Status.READS) else None)


def packed(flags: Sequence[bool], width: int) -> Tensor:
    """Flags as whole numbers of BITS bits, which float64 holds exactly. `width`: flags that are not there are False."""
    bits = np.zeros(-(-width // BITS) * BITS, dtype=np.int64)
    bits[: len(flags)] = flags
    return torch.from_numpy((bits.reshape(-1, BITS) << np.arange(BITS)).sum(1)).double()


def unpacked(numbers: Tensor, width: int) -> Tensor:
    """[ranks, numbers] -> bool [ranks, width]."""
    bits = numbers.long().numpy()[:, :, None] >> np.arange(BITS) & 1
    return torch.from_numpy(bits.reshape(len(numbers), -1)[:, :width].astype(bool))


def refuse_failed(table: StepStatus, step_state: StepState, problem: str | None, this_rank_discards: bool) -> None:
    """All ranks together: when one of them failed or drops the step, all do. `this_rank_discards`: it asked."""
    mesh, ranks, inconsistent = step_state.mesh, len(table.status), table.ranks(Status.INCONSISTENT)
    gave_up = inconsistent + table.ranks(Status.FAILED) + table.ranks(Status.DISCARDS)
    begins, alike = table.ranks(Status.BEGINS), {status: table.ranks(status) for status in SAME}
    for status, found in alike.items():
        if 0 < len(found) < ranks and not gave_up:
            raise EngineError("IG555", where=mesh.describe_rank(), does=SAME[status], found=found)
    if any(alike.values()) and not gave_up:
        return
    if len(begins) + len(table.ranks(Status.FINE)) == ranks:
        if begins and len(begins) < ranks:
            seen = f"engine.begin, or a first backward of terms, on ranks {begins}; step() or grads() on the others"
            raise EngineError("IG566", seen=seen, where=mesh.describe_rank())
        return
    reasons = all_gather_object(problem or step_state.now.phase.failure, mesh)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if this_rank_discards:
        return
    if inconsistent:
        raise _inconsistent(step_state, {rank: failed[rank] for rank in inconsistent})
    if failed:
        ranks_failed = f"rank {', '.join(map(str, failed))}"
        seen = "; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
        if all(reason.removeprefix("EngineError: ").startswith("IG553") for reason in failed.values()):
            raise changed_by_hand(f"gradients of {ranks_failed}", mesh.describe_rank(), seen)
        raise EngineError("IG550", seen=seen, where=mesh.describe_rank(), failed=ranks_failed)
    raise EngineError("IG558", where=mesh.describe_rank(), ranks=table.ranks(Status.DISCARDS))


def _inconsistent(step_state: StepState, why: Mapping[int, str]) -> EngineError:
    step_state.mark_inconsistent(f"learned of it from rank {min(why)}")
    said = "; ".join(f"rank {rank}: {text}" for rank, text in why.items())
    return EngineError("IG559", seen=said, where=step_state.mesh.describe_rank())


def optimizer_problem(step_state: StepState, raised: BaseException | None) -> BaseException | None:
    """All ranks together, behind their optimizers: what each raises where one has raised. No rank's step is taken."""
    if raised is not None:
        step_state.mark_inconsistent(headline(raised))
    said = torch.tensor([float(raised is not None)], dtype=torch.float64)
    found = raw.gather(said, step_state.status_group)[:, 0].nonzero().flatten().tolist()
    if not found:
        return None
    reasons = all_gather_object(step_state.optimizer_inconsistent, step_state.mesh)
    return raised or _inconsistent(step_state, {rank: str(reasons[rank]) for rank in found})


def refuse_parted(table: StepStatus, step_state: StepState) -> None:
    """All ranks together: optimizers that step each rank's own copy ("steps" counts them) have stepped equally often,
    or one has raised."""
    steps = table.more["steps"][:, 0] if "steps" in table.more else torch.zeros(1)
    if bool((steps != steps[0]).any()) and not table.ranks(Status.INCONSISTENT):
        counted = ", ".join(f"rank {rank}: {int(count)}" for rank, count in enumerate(steps))
        step_state.mark_inconsistent(f"optimizers have stepped unequally often ({counted})")
        raise EngineError("IG559", seen=f"steps of {counted}", where=step_state.mesh.describe_rank())


def refuse_wrong(table: StepStatus, mesh: Mesh) -> None:
    """Raised alike on all ranks, from the same table."""
    bad = (~(table.weight >= 0) | table.weight.isinf()).nonzero().flatten().tolist()
    if not bad and math.isinf(float(of_data(table.weight, mesh).sum())):  # the loss would be 0
        bad = of_data(torch.arange(len(table.weight)), mesh).tolist()
    if bad:
        seen, name = f"sums of weights {[float(table.weight[rank]) for rank in bad]}", f"a loss on ranks {bad}"
        raise EngineError("IG515", seen=seen, where=mesh.describe_rank(), name=name)
    groups = mesh.all_groups("tp")
    weights, losses = table.weight[groups], table.loss[groups]
    peers = _first(groups, weights != weights[:, :1])
    if peers:
        seen = f"weights {table.weight[peers].tolist()} on ranks {peers}"
        raise EngineError("IG516", seen=seen, where=mesh.describe_rank(), axes="tp", things="batches")
    peers = _first(groups, (losses - losses[:, :1]).abs() > SAME_LOSS * losses.abs().amax(1, keepdim=True))
    if peers:
        raise EngineError("IG547", where=mesh.describe_rank(), losses=table.loss[peers].tolist(), peers=peers)
    without, given = (np.flatnonzero(kind).tolist() for kind in table.more["losses"].numpy().T)
    if without and given:
        seen = f"losses without a weight on ranks {without}; with one on ranks {given}"
        raise EngineError("IG535", seen=seen, where=mesh.describe_rank())
    groups = mesh.all_groups(STAGE)
    settings, synced_backwards = table.settings[groups], table.synced_backwards[groups]
    stage = _first(groups, settings != settings[:, :1])
    if stage:
        unlike = [rank for rank in stage if table.settings[rank] != table.settings[stage[0]]]
        raise EngineError("IG548", where=mesh.describe_rank(), unlike=unlike, first=stage[0])
    known: dict[float, tuple[int, float]] = {}
    for rank in mesh.all_groups("pp")[0].tolist() if "kinds" in table.more else ():  # ranks of a stage are alike
        for kind, digest in table.more["kinds"][rank].view(-1, 2).tolist():
            first, other = known.setdefault(kind, (rank, digest))
            if digest != other:
                raise EngineError("IG548", where=mesh.describe_rank(), unlike=[rank], first=first)
    stage = _first(groups, synced_backwards != synced_backwards[:, :1])
    if stage:
        seen = ", ".join(f"rank {rank}: {int(table.synced_backwards[rank])}" for rank in stage)
        raise EngineError("IG554", seen=seen, where=mesh.describe_rank())


def refuse_weightless(table: StepStatus, term_weights: TermWeights, mesh: Mesh) -> None:
    """Raised alike on all ranks: a step in which no rank has anything to learn from."""
    expected = term_weights.expected
    weights = of_data(table.weight if expected is None else expected.sum(1), mesh)
    if not float(weights.sum()) > 0:
        raise EngineError("IG512", where=mesh.describe_rank(), weights=weights.tolist())


def _first(groups: Tensor, apart: Tensor) -> list[int]:
    """The first group of which a member is apart from the first member; none if all agree."""
    found: list[list[int]] = groups[apart.any(1)].tolist()
    return found[0] if found else []


def totals(table: StepStatus, term_weights: TermWeights, mesh: Mesh, loss_scale: float, norm: float) -> StepTotals:
    """What the table of a step that is taken says."""
    if term_weights.expected is None:
        weight, losses, terms = float(of_data(table.weight, mesh).sum()), of_data(table.loss, mesh), {}
    else:
        weight, losses = term_weights.weight, table.loss[with_own_things(mesh)]
        terms = term_weights.means(table.more["terms"][with_own_things(mesh)])
    return StepTotals(float(tree_sum(losses)) / weight, weight, loss_scale, norm, table.loss, terms)


def of_data(table: Tensor, mesh: Mesh) -> Tensor:
    """Of a row per rank, those of the data ranks whose losses are mine to know: on the last stage."""
    last = mesh.layout.rank({**mesh.coordinates, "pp": mesh.layout.pp - 1})
    return table[list(mesh.ranks(DATA, last))]


def with_own_things(mesh: Mesh) -> list[int]:
    """The ranks whose terms are added up: those that hold other data or other stages than this one, and it."""
    return list(mesh.ranks(f"{DATA} pp"))


def used_anywhere(table: StepStatus, plan: Plan, mesh: Mesh) -> Tensor:
    """Bool per parameter of this rank: whether any part of it was used by a rank of its stage, or by a stage that it is
    tied to. (An expert that got no token is stepped as one device steps it, which has all experts in one tensor.)"""
    mine = table.used[list(mesh.ranks(STAGE)), : len(plan.slots)].any(0)
    for axes in sorted({axes for slot in plan.slots for axes in slot.contract.ties}):
        tied = sorted((s.name, i) for i, s in enumerate(plan.slots) if axes in s.contract.ties)
        places = [i for _, i in tied]
        mine[places] = raw.all_reduce(mine[places].double(), mesh.host_group(axes), control=True) > 0
    return mine
