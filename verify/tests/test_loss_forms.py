"""A mean of means is named in whatever way a program writes its loss, and the same program with one divisor passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isograd_verify.record.events import Backward
from isograd_verify.record.recording import Recording
from isograd_verify.run.attach import inspect
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, NOTE
from isograd_verify.watch.means import added

from . import loss_forms

Worlds = Callable[[int], LocalRanks]
OWN = "each divides by its own number of"
SHARED = "each micro-batch divides by its own number of"


def test_a_mean_of_means_is_named_in_every_form_of_a_loss(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(partial(loss_forms.watched, str(tmp_path)))
    worlds(2).run(partial(loss_forms.watched_cut, str(tmp_path)))
    seen = {home.name: inspect(home).findings for home in sorted(tmp_path.iterdir())}
    unknown = [seen.pop(f"unknown-{divisor}") for divisor in ("all", "own")]
    assert len(seen) == 2 * len(loss_forms.FORMS) + 2 + 2
    for name, findings in seen.items():
        told = [(f.verdict, f.bug) for f in findings]
        assert told == ([] if name.endswith("-all") else [(BUG, "mean-of-means")]), name
        if findings:
            assert (OWN if name.endswith("-own") else SHARED) in findings[0].sentence, name
            counts = "8, 5" if name.startswith("cut") else "8, 5, 6, 3"
            assert f": {counts}" in findings[0].sentence, name
    for (note,) in unknown:
        assert (note.verdict, note.sentence.partition(" to have ")[2].partition(" after ")[0]) == (
            NOTE,
            "them judged, put 'loss = isograd_verify.weigh(loss, number_of_labels)'",
        )
        assert note.sentence.endswith(" in unknown")


@pytest.mark.parametrize("divisor", ["all", "own"])
def test_backwards_inside_a_forward_belong_to_its_micro_batch(tmp_path: Path, divisor: str) -> None:
    loss_forms.watched_tiles(tmp_path, divisor)
    subject = inspect(tmp_path)
    assert [f.bug for f in subject.findings] == ([] if divisor == "all" else ["mean-of-means"])
    recording = Recording(tmp_path)
    assert len(recording.ranks[0].of(Backward)) == 2
    if divisor == "own":
        assert subject.findings[0].sentence.endswith("(each divides by its own number of labels: 8, 5)")


M = torch.tensor([[0.0, 1, 1, 0]] * 3)
SUMMED: dict[str, tuple[Callable[[Tensor], Tensor], int, bool]] = {
    "times a mask": (lambda x: x * M, 6, True),
    "a mask times it, reshaped": (lambda x: -(M * x * 2).view(-1), 6, True),
    "the sums of rows": (lambda x: (x * M).sum(-1), 6, True),
    "the means of rows": (lambda x: (x * M).sum(-1) / M.sum(-1), 3, False),
    "a mask of one row": (lambda x: x * M[0], 6, True),
    "filled": (lambda x: x.masked_fill(M.bool(), 0), 6, True),
    "where": (lambda x: torch.where(M.bool(), 0, x), 6, True),
    "selected": (lambda x: x[M.bool()], 6, False),
    "weighed and masked": (lambda x: x * M * torch.linspace(1, 2, 12).view(3, 4), 6, True),
    "two of the model's own": (lambda x: x * x.exp(), 12, False),
}


@pytest.mark.parametrize("name", SUMMED)
def test_a_mask_tells_how_many_numbers_a_sum_adds_up(name: str) -> None:
    make, count, masked = SUMMED[name]
    assert added(make(torch.ones(3, 4, requires_grad=True))) == (count, masked)


def test_a_mask_behind_hooks_on_saved_tensors_is_not_asked_for() -> None:
    def unpack(_: object) -> Tensor:
        raise AssertionError("it was asked for")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        assert added(torch.ones(3, 4, requires_grad=True) * M) == (12, False)
