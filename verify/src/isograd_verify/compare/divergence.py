"""The first module that goes wrong: its input is the reference's and its output is not.

Activations of a layout are parts of the reference's, recognised by their values, row by row (or column by column); in
backward the gradients of outputs are, up to one factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isograd_verify import tolerances
from isograd_verify.judge.patterns import class_of
from isograd_verify.record.events import Loss
from isograd_verify.record.recording import RankRecord, Recording
from isograd_verify.record.sketch import dtype_name
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding
from isograd_verify.tell.wording import axis_over

HALF = 0.5
LARGEST = 4096  # rows that are looked for


@dataclass(frozen=True)
class Match:
    """Whether a part was found in the reference's activation, and in its order."""

    found: bool
    ordered: bool = True  # false: every row is there, in another order


def contained(local: Tensor, whole: Tensor, directions: bool = False, share: float = 1.0) -> Match:
    """Whether every row (or else column) of a local activation is one of the reference's. `directions`: up to their
    length. `share`: how many of the rows must be found; a layout's pads are rows of nobody's."""
    if not local.is_floating_point() or not whole.is_floating_point():
        return Match(True)
    for turn in (False, True):
        mine, theirs = _rows(local, turn), _rows(whole, turn)
        if directions:
            mine, theirs = (nn.functional.normalize(rows, dim=1) for rows in (mine, theirs))
        if mine.shape[1] != theirs.shape[1] or max(len(mine), len(theirs)) > LARGEST:
            continue
        scale = theirs.norm(dim=1).max().clamp_min(1e-30)
        limit = tolerances.ACTIVATION.get(dtype_name(local), tolerances.ACTIVATION_HALF)
        close = torch.cdist(mine, theirs) <= limit * scale
        known = close.any(1)
        if float(known.double().mean()) >= share:
            return Match(True, _in_order(close[known]))
    return Match(False)


def _in_order(close: Tensor) -> bool:
    """Whether the rows occur among the reference's in their own order, however often."""
    at = -1
    for row in close:
        later = row[at + 1 :].nonzero()
        if not len(later):
            return not _one_to_one(close)
        at += 1 + int(later[0])
    return True


def _one_to_one(close: Tensor) -> bool:
    """Whether each row can be given one of the reference's for itself."""
    free = torch.ones(close.shape[1], dtype=torch.bool)
    for row in close:
        left = (row & free).nonzero()
        if not len(left):
            return False
        free[left[0]] = False
    return True


def _rows(t: Tensor, turn: bool) -> Tensor:
    flat = t.double().reshape(-1, t.shape[-1]) if t.dim() else t.double().reshape(1, 1)
    return flat.T if turn else flat


def same_numbers(local: Tensor, whole: Tensor) -> bool:
    """The reference's numbers in other places: every element occurs, the arrangement does not."""
    if not 1 < whole.numel() >= local.numel() or local.dtype != torch.float64:  # others are near by chance
        return False
    mine, theirs = local.flatten().sort().values, whole.double().flatten().sort().values
    spots = torch.searchsorted(theirs, mine).clamp(1, len(theirs) - 1)
    near = torch.minimum((theirs[spots] - mine).abs(), (theirs[spots - 1] - mine).abs())
    return bool((near <= tolerances.NUMBERS * theirs.abs().max()).all())


def first_divergence(reference: Recording, candidate: Recording) -> list[Finding]:
    """One finding for forward, else one for backward, else none (activations were not recorded, or all agree)."""
    step = min(reference.steps)
    truth: dict[str, list[Tensor]] = defaultdict(list)
    for kind in ("in", "out", "back"):
        for _, label, value in _recorded(reference.ranks[0].tensors(step), kind):
            truth[f"{kind}/{label}"].append(value)
    if not truth:
        return []
    whole = {k: _joined(v) for k, v in truth.items()}
    for record in candidate.ranks:
        tensors = record.tensors(step)
        inputs = {label: value for micro, label, value in _recorded(tensors, "in") if micro == 0}
        for micro, label, made in _recorded(tensors, "out"):  # as they finish: inner modules first
            given = inputs.get(label)
            if micro != 0 or f"out/{label}" not in whole or made.dim() == 0:  # a mean loss has no rows
                continue
            into = Match(True)
            if given is not None and f"in/{label}" in whole:
                into = contained(given, whole[f"in/{label}"], share=HALF)
            match = contained(made, whole[f"out/{label}"], share=HALF)
            shuffled = into.ordered and match.found and not match.ordered
            if not into.found or (match.found and not shuffled):
                continue
            module = label.partition("#")[0] or "the model"
            if candidate.world > 1 and class_of(f"{module}.weight") == "experts":
                continue  # a rank's own experts make a part of what all make
            shuffled = shuffled or same_numbers(made, whole[f"out/{label}"])
            axis = axis_over(candidate, tuple(range(candidate.world)))
            bug = _forward_bug(made, whole[f"out/{label}"], label, tensors, candidate.world)
            said = f"{module} is the first whose output differs although its input is right (rank {record.rank})"
            if shuffled and _columns_moved(made, whole[f"out/{label}"], record):
                bug = "loss-labels-shifted"
                said = (
                    f"the columns of {module}, which are the loss's classes, stand in another order than one device "
                    f"has them, and labels count them (rank {record.rank})"
                )
            elif shuffled:
                bug = "ulysses-permute"
                said = (
                    f"{module} is given the right input and returns the right numbers in other places (a permutation "
                    f"of batch, position and head) on rank {record.rank}"
                )
            return [Finding(BUG, bug, f"forward: {said}", axis=axis)]
    return _backward(whole, truth, candidate, step)


def _columns_moved(made: Tensor, whole: Tensor, record: RankRecord) -> bool:
    """Whether each row of logits is one of the reference's rows, with its columns in another order."""
    classes = {event.classes for event in record.of(Loss)}  # of which cross-entropies had labels
    if made.dim() != 2 or made.shape[1] not in classes or made.shape[1:] != whole.shape[1:]:
        return False
    return contained(made.sort(1).values, whole.sort(1).values).found


def _recorded(tensors: dict[str, Tensor], kind: str) -> Iterator[tuple[int, str, Tensor]]:
    """(micro-batch, 'MODULE#CALL', activation) in the order in which they came."""
    keys = [key.split("/", 3) for key in tensors if key.startswith(kind + "/")]
    for _, micro, number, label in sorted(keys, key=lambda parts: parts[2]):
        yield int(micro), label, tensors[f"{kind}/{micro}/{number}/{label}"]


def _joined(values: list[Tensor]) -> Tensor:
    """Micro-batches of the reference, one after another."""
    if len({v.shape[-1:] for v in values}) > 1 or values[0].dim() == 0:
        return values[0]
    return torch.cat([v.reshape(-1, v.shape[-1]) for v in values])


def _forward_bug(made: Tensor, whole: Tensor, label: str, tensors: dict[str, Tensor], world: int) -> str:
    if made.numel() != whole.numel() or not made.dim():
        return ""
    extra = (made.double().flatten() - whole.double().flatten()).reshape(-1, made.shape[-1])
    module = label.partition("#")[0]
    for name, value in tensors.items():
        if name.startswith(f"parameter/{module}") and name.endswith("bias") and value.shape == extra.shape[1:]:
            for times in range(1, world):
                if float((extra - times * value.double()).norm()) <= tolerances.BIAS * float(extra.norm()):
                    return "bias-n-times"
    return ""


def _sum(values: list[Tensor]) -> Tensor | None:
    return torch.stack(values).sum(0) if len({v.shape for v in values}) == 1 else None


def _backward(
    whole: dict[str, Tensor], truth: dict[str, list[Tensor]], candidate: Recording, step: int
) -> list[Finding]:
    """What all samples share (learned positions) is right where its sums over micro-batches are."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for record in candidate.ranks:
        for _, label, value in _recorded(record.tensors(step), "back"):
            parts[label].append(value)
    for record in candidate.ranks:
        for micro, label, value in _recorded(record.tensors(step), "back"):
            key = f"back/{label}"
            if micro != 0 or key not in whole or contained(value, whole[key], True, HALF).found:
                continue
            total, expected = _sum(parts[label]), _sum(truth[key])
            if total is not None and expected is not None and contained(total, expected, True).found:
                continue
            module = label.partition("#")[0] or "the model"
            sentence = f"backward: the gradient of {module}'s output is the first that differs (rank {record.rank})"
            return [Finding(INCONCLUSIVE, "", sentence, axis=axis_over(candidate, tuple(range(candidate.world))))]
    return []
