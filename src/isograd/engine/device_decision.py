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
    """A step that has been launched, as the host knows it when it has read the card's numbers."""

    taken: bool
    grad_norm: float
    raised: BaseException | None  # by this rank's optimizer


class DeviceDecision:
    """Decides an engine's steps on its card."""

    def __init__(
        self, mesh: Mesh, optimizer: ShardedOptimizer, step_state: StepState, clip: float | None, same_inputs: str
    ) -> None:
        """same_inputs: the axes whose ranks must be given equal batches."""
        self.mesh, self._optimizer, self._step_state, self._clip = mesh, optimizer, step_state, clip
        last = mesh.layout.rank({**mesh.coordinates, "pp": mesh.layout.pp - 1})
        places = torch.tensor(mesh.layout.ranks(DATA, last)), mesh.all_groups("tp"), mesh.all_groups(same_inputs)
        self._places = [place.to(mesh.device) for place in places] if mesh.on_cards else list(places)

    def possible(self, whole: bool) -> Tensor:
        """For the gather of the step: whether this rank can."""
        can = whole and self.mesh.on_cards and not self._step_state.reproducible and self._optimizer.takes_verdicts()
        return torch.full((1,), float(can), dtype=torch.float64)

    def run(
        self, rows: Tensor, table: StepStatus, unused: set[str], loss_scale: float
    ) -> tuple[Tensor, DeviceStep | None]:
        """rows: [ranks, numbers] on the card: squares of gradients, then what `table` awaits. They are returned in host
        memory, with the step if it was launched."""
        if not self._all_can(table):
            return raw.to_host(rows), None
        verdict = verdict_of(rows, self._places, self._clip, loss_scale)
        raised = self._optimizer.step(self._step_state, 0.0, unused, verdict)
        own = torch.stack((verdict.refused.double(), verdict.grad_norm))
        refused, grad_norm, *numbers = raw.to_host(torch.cat((own, rows.flatten()))).unbind()
        step = DeviceStep(not bool(refused), float(grad_norm), raised)
        return torch.stack(numbers).view(rows.shape), step

    def _all_can(self, table: StepStatus) -> bool:
        if table.late is None or not bool(table.more["device"].all()):
            return False
        try:  # what hosts know; the zeros where cards' numbers will stand refuse nothing
            step_status.refuse_wrong(table, self.mesh)
        except EngineError:
            return False
        return True


def verdict_of(rows: Tensor, places: list[Tensor], clip: float | None, loss_scale: float) -> Verdict:
    """rows: per rank its squares, weight, loss, digest of inputs and count of wrong ones. places: the ranks whose
    weights are added up, and groups of ranks that have equal losses and weights, and equal inputs."""
    squares, weights, losses, digests, wrong = rows.unbind(1)
    data, tp, same_inputs = places
    weight = tree_sum(weights.index_select(0, data))
    scale = 1.0 / (weight * loss_scale)
    grad_norm = tree_sum(squares).sqrt() * scale
    factor = scale if clip is None else scale * (clip / (grad_norm + 1e-6)).clamp(max=1.0)
    right = grad_norm.isfinite() & (weight > 0) & (factor > SCALES[0]) & (factor < SCALES[1])
    right = right & (weights >= 0).all() & weights.isfinite().all() & (wrong == 0).all()
    if tp.shape[1] > 1:
        near = losses[tp]
        apart = (near - near[:, :1]).abs() > SAME_LOSS * near.abs().amax(1, keepdim=True)
        right = right & ~apart.any() & _equal(weights, tp)
    if same_inputs.shape[1] > 1:
        right = right & _equal(digests, same_inputs)
    divisor = torch.where(right, 1.0 / factor, 1.0).float()
    return Verdict((~right).float(), divisor, grad_norm)


def _equal(numbers: Tensor, groups: Tensor) -> Tensor:
    of_groups = numbers[groups]
    return (of_groups == of_groups[:, :1]).all()
