"""A step that is decided on the card: its optimizer is launched before the host has read the step's numbers.

What decides a step (norm, weights, losses, digests of inputs) lies on cards, gathered from all ranks. From these rows
each card computes the clip factor, and whether the step is surely right. Fused optimizers of torch take both as tensors
(`grad_scale` and `found_inf`, which makes them do nothing), so they are launched at once, and then the host reads the
rows and decides as always (Engine._decide). Where the card has refused what the host takes, the host steps from the
gradients, which are still there. The card never takes what the host refuses: each refusal that depends on cards'
numbers has its line in `verdict_of`. All is IEEE arithmetic in one order, so all cards compute the same bits.

Ranks do this together: each says in the gather of the step whether its optimizer can, and one that cannot decides for
all. None can in its first step, where a refusal would leave an optimizer's state behind that was not there before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.core.mesh import DATA, Mesh
from isograd.engine import step_status
from isograd.engine.step import StepState
from isograd.engine.step_status import SAME_LOSS, StepStatus
from isograd.engine.tree import tree_sum
from isograd.engine.zero import SCALES, ShardedOptimizer, Verdict
from isograd.errors import EngineError


@dataclass(frozen=True)
class DeviceStep:
    """A step that the card has taken, as the host knows it when it has read the card's numbers."""

    grad_norm: float
    raised: BaseException | None  # by this rank's optimizer


class DeviceDecision:
    """Decides an engine's steps on its card."""

    def __init__(
        self, mesh: Mesh, optimizer: ShardedOptimizer, step_state: StepState, clip: float | None, same_inputs: str
    ) -> None:
        """same_inputs: the axes whose ranks must be given equal batches."""
        self.mesh, self._optimizer, self._step_state, self._clip = mesh, optimizer, step_state, clip
        self._places = places_of(mesh, same_inputs)

    def possible(self, whole: bool) -> Tensor:
        """For the gather of the step: whether this rank can."""
        can = whole and self.mesh.on_cards and not self._step_state.reproducible and self._optimizer.takes_verdicts()
        return torch.full((1,), float(can), dtype=torch.float64)

    def run(
        self, rows: Tensor, table: StepStatus, unused: set[str], loss_scale: float
    ) -> tuple[Tensor, DeviceStep | None]:
        """rows: [ranks, numbers] on the card: squares of gradients, then what `table` awaits. They are returned in host
        memory, with the step if it is taken."""
        if not self._all_can(table):
            return raw.to_host(rows), None
        verdict = verdict_of(rows, self._places, self._clip, loss_scale)
        raised = self._optimizer.step(self._step_state, 0.0, unused, verdict)
        own = torch.stack((verdict.refused, verdict.grad_norm))
        numbers = raw.to_host(torch.cat((own, rows.flatten())))
        return numbers[2:].view(rows.shape), None if numbers[0] else DeviceStep(float(numbers[1]), raised)

    def _all_can(self, table: StepStatus) -> bool:
        if table.late is None or not bool(table.more["device"].all()):
            return False
        try:  # what hosts know; the zeros where cards' numbers will stand refuse nothing
            step_status.refuse_wrong(table, self.mesh)
        except EngineError:
            return False
        return True


def places_of(mesh: Mesh, same_inputs: str) -> list[Tensor]:
    """[ranks, 2]: 1 where a rank's squares, and its weight, are added up. Groups of ranks that have equal losses and
    weights, and equal inputs. The least and the largest that numbers of a right step are: squares, weights and counts
    of wrong inputs of all ranks, the norm, the factor of gradients."""
    ranks, last = mesh.layout.world_size, mesh.layout.rank({**mesh.coordinates, "pp": mesh.layout.pp - 1})
    summed = torch.ones(ranks, 2, dtype=torch.float64)
    summed[:, 1] = torch.isin(torch.arange(ranks), torch.tensor(mesh.layout.ranks(DATA, last)))
    least, largest = torch.zeros(3 * ranks + 2, dtype=torch.float64), torch.finfo(torch.float64).max
    least[:ranks], least[-1] = -largest, SCALES[0]
    most = torch.tensor([largest] * 2 * ranks + [0.0] * ranks + [largest, SCALES[1]], dtype=torch.float64)
    places = summed, mesh.all_groups("tp"), mesh.all_groups(same_inputs), least, most
    return [place.to(mesh.device) if mesh.on_cards else place for place in places]


def verdict_of(rows: Tensor, places: list[Tensor], clip: float | None, loss_scale: float) -> Verdict:
    """rows: per rank its squares, weight, loss, digest of inputs and count of wrong ones. places: of `places_of`."""
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
