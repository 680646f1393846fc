"""What all ranks' numbers decide: whether a step is taken, skipped or refused, and by which factor it is clipped.

On cards, what decides (norm, weights, losses, digests of inputs) lies there, gathered from all ranks. From these rows
each card computes the clip factor, and whether the step is surely right. Fused optimizers of torch take both as tensors
(`grad_scale` and `found_inf`, which makes them do nothing), so they are launched at once, and then the host reads the
rows and decides as always. Where the card has refused what the host takes, the host steps from the gradients, which are
still there. The card never takes what the host refuses: each refusal that depends on cards' numbers has its line in
`verdict_of`. All is IEEE arithmetic in one order, so all cards compute the same bits.

Ranks do this together: each says in the gather of the step whether its optimizer can, and one that cannot decides for
all. None can in its first step, where a refusal would leave an optimizer's state behind that was not there before.

`take(may_be_late=True)` does not wait for a card that decides: what it says is read later (`Taken.wait`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.core.input_checks import InputChecks
from isograd.core.mesh import Mesh
from isograd.engine import norm, step_status
from isograd.engine.evaluation import Stats
from isograd.engine.nonfinite import find_nonfinite
from isograd.engine.step import StepState
from isograd.engine.step_status import SAME_LOSS, Status, StepStatus, StepTotals
from isograd.engine.term_weights import TermWeights
from isograd.engine.tree import tree_sum
from isograd.engine.zero import SCALES, ShardedOptimizer, Verdict
from isograd.errors import EngineError, IsogradError

COLUMNS = 5  # of a rank's row: its squares, weight, loss, digest of inputs and count of wrong ones


@dataclass(frozen=True)
class Taken:
    """A step that is over on this rank."""

    wait: Callable[[], Stats]  # for a card; raises what is refused
    raised: BaseException | None  # by this rank's optimizer
    skipped: bool = False
    late: bool = False  # the host has not read what the card says, nor whether it has skipped the step


class Decision:
    """Decides an engine's steps, on its card or on the host."""

    def __init__(
        self,
        mesh: Mesh,
        optimizer: ShardedOptimizer,
        step_state: StepState,
        inputs: InputChecks,
        refuse: Callable[..., None],
        drop: Callable[[], None],
    ) -> None:
        """refuse: what is wrong with a table that was read late, alike on all ranks. drop: the step, on all ranks."""
        self.mesh, self._optimizer, self._step_state, self._inputs = mesh, optimizer, step_state, inputs
        self._refuse, self._drop = refuse, drop
        self._places, self._counted = places_of(mesh, inputs.peers), norm.counted(step_state.plan.slots, mesh)

    def possible(self, whole: bool) -> Tensor:
        """For the gather of the step: whether this rank's card can decide it."""
        can = whole and self.mesh.on_cards and not self._step_state.reproducible and self._optimizer.takes_verdicts()
        return torch.full((1,), float(can), dtype=torch.float64)

    def take(self, table: StepStatus, unused: set[str], clip: float | None, *, may_be_late: bool) -> Taken:
        """Everything is reduced. Skip, or step with `clip`."""
        state, raised, rows = self._step_state, None, self._rows(table)
        by_card = rows is not None and bool(table.more["device"].all())
        if rows is not None and by_card:
            verdict = verdict_of(rows, self._places, clip, state.now.scale)
            raised = self._optimizer.step(state, 0.0, unused, verdict)
            own = torch.stack((verdict.refused, verdict.grad_norm))
            numbers = raw.copy_to_host(torch.cat((own, rows.flatten())))
            usual = clip is None or SCALES[0] < clip < SCALES[1]  # else the host may take what the card does not
            if may_be_late and usual and state.now.loss_scale is None:
                weights = state.now.term_weights

                def read() -> Stats:
                    try:
                        return self._read_late(numbers(), table, weights)
                    except IsogradError:
                        if state.now.before is read:  # said here; it is said once
                            state.change(before=None)
                        raise

                return Taken(read, raised, late=True)
            here = numbers()
            refused, grad_norm = here[:2].tolist()
            by_card, rows = not refused, here[2:].view(rows.shape)
        totals = self.totals(table, rows, whole=True)
        if not by_card:
            grad_norm = totals.norm * totals.scale
        skipped = not math.isfinite(grad_norm)
        nonfinite = find_nonfinite(state, totals.losses) if skipped else None
        if not by_card and not skipped:
            factor = min(1.0, clip / (grad_norm + 1e-6)) if clip is not None else 1.0
            raised = self._optimizer.step(state, totals.scale * factor, unused)
        stats = Stats(totals.loss, grad_norm, totals.weight, skipped, totals.loss_scale, totals.terms, nonfinite)
        return Taken(lambda: stats, raised, skipped)

    def _read_late(self, numbers: Tensor, table: StepStatus, term_weights: TermWeights) -> Stats:
        """The step is over on this rank, and no other one is asked."""
        assert table.late is not None
        table = table.late.complete(numbers[2:].view(-1, COLUMNS)[:, 1:])
        self._inputs.check(table.more["inputs"], late=True)
        step_status.refuse_wrong(table, self.mesh)
        step_status.refuse_weightless(table, term_weights, self.mesh)
        totals = step_status.totals(table, term_weights, self.mesh, 1.0, math.nan)
        refused, grad_norm = bool(numbers[0]), float(numbers[1])
        if refused and math.isfinite(grad_norm):
            seen = f"gradients of norm {grad_norm:g}, a weight of {totals.weight:g}"
            raise EngineError("IG587", seen=seen, where=self.mesh.describe_rank())
        return Stats(totals.loss, grad_norm, totals.weight, refused, totals.loss_scale)

    def totals(self, table: StepStatus, rows: Tensor | None = None, whole: bool = False) -> StepTotals:
        """What all ranks' rows come to. `whole`: for a step.

        On cards, weights and losses are read here, with the norm: the host waits once in a step. What they refuse is
        refused here, with everything reduced and nothing stepped."""
        value, state, rows = math.nan, self._step_state, self._rows(table) if rows is None else rows
        if table.late is not None and rows is not None:
            rows = raw.to_host(rows)
            value, table = math.sqrt(sum(rows[:, 0].tolist())), table.late.complete(rows[:, 1:])
            with step_status.refusing(state, self._drop):
                self._refuse(table, status=Status.FINE if whole else Status.READS)
        elif whole and not state.reproducible:
            value = norm.global_norm(*self._squared())
        if whole and state.reproducible:
            value = norm.reproducible_norm(*self._squared())
        return step_status.totals(table, state.now.term_weights, self.mesh, state.now.scale, value)

    def _rows(self, table: StepStatus) -> Tensor | None:
        """Where a part of the table lies on cards: [ranks, COLUMNS] of all ranks."""
        return None if table.late is None else norm.global_norm_beside(*self._squared(), table.late.mine)

    def _squared(self) -> tuple[list[Tensor], Group, torch.device]:
        """The arguments of a norm: what this rank counts of the reduced gradients, and whose squares are added up."""
        shards, slots = self._step_state.now.final_shards, self._step_state.plan.slots
        counted = [shards[slot] for slot in self._counted if slot in shards and shards[slot].numel()]
        return counted, self.mesh.group("world"), slots[0].parameter.device


def places_of(mesh: Mesh, same_inputs: str) -> list[Tensor]:
    """[ranks, 2]: 1 where a rank's squares, and its weight, are added up. Groups of ranks that have equal losses and
    weights, and equal inputs. The least and the largest that numbers of a right step are: squares, weights and counts
    of wrong inputs of all ranks, the norm, the factor of gradients."""
    every = torch.arange(ranks := mesh.layout.world_size)
    summed = torch.ones(ranks, 2, dtype=torch.float64)
    summed[:, 1] = torch.isin(every, step_status.of_data(every, mesh))
    least, largest = torch.zeros(3 * ranks + 2, dtype=torch.float64), torch.finfo(torch.float64).max
    least[:ranks], least[-1] = -largest, SCALES[0]
    most = torch.tensor([largest] * 2 * ranks + [0.0] * ranks + [largest, SCALES[1]], dtype=torch.float64)
    places = summed, mesh.all_groups("tp"), mesh.all_groups(same_inputs), least, most
    return [place.to(mesh.device) if mesh.on_cards else place for place in places]


def verdict_of(rows: Tensor, places: list[Tensor], clip: float | None, loss_scale: float) -> Verdict:
    """rows: [ranks, COLUMNS]. places: of `places_of`."""
    summed, tp, same_inputs, least, most = places
    squares, weights, losses, digests, unknown = rows.unbind(1)
    square, weight = tree_sum(rows[:, :2] * summed).unbind()
    scale = (weight * loss_scale).reciprocal()
    grad_norm = square.sqrt() * scale
    factor = scale if clip is None else scale * (clip / (grad_norm + 1e-6)).clamp(max=1.0)
    numbers = torch.cat((squares, weights, unknown, torch.stack((grad_norm, factor))))
    wrong = (numbers.clamp(least, most) != numbers).any()  # NaN is unlike itself
    if tp.shape[1] > 1:
        near = losses[tp]
        apart = (near - near[:, :1]).abs() > SAME_LOSS * near.abs().amax(1, keepdim=True)
        wrong = wrong | apart.any() | _unequal(weights, tp)
    if same_inputs.shape[1] > 1:
        wrong = wrong | _unequal(digests, same_inputs)
    return Verdict(wrong.float(), factor.reciprocal().float(), grad_norm)


def _unequal(numbers: Tensor, groups: Tensor) -> Tensor:
    of_groups = numbers[groups]
    return (of_groups != of_groups[:, :1]).any()
