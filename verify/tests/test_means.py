"""Means of means are told for any loss that is a mean, and programs that weigh, share or have equal counts are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.record.events import MeanWeight
from isograd_verify.record.recording import Recording
from isograd_verify.run.attach import inspect
from isograd_verify.tell.findings import BUG, NOTE, PASS, Finding, Subject
from isograd_verify.watch.capture import Capture

WIDTH = 3
Loss = Callable[[Tensor, Tensor], Tensor]


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64)


def watch(home: Path, loss: Loss, counts: tuple[int, ...], scale: Callable[[int], float] | None = None) -> Subject:
    """Two steps over micro-batches of so many rows; `scale`: of each micro-batch's loss, by its rows."""
    torch.manual_seed(0)
    model = nn.Linear(4, WIDTH).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(home, steps=2, lenient=True):
        for _ in range(2):
            for n in counts:
                y = torch.rand(n, WIDTH, dtype=torch.float64)
                (loss(model(rows(n)), y) * (scale(n) if scale else 1 / len(counts))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return inspect(home)


def judged(subject: Subject) -> list[Finding]:
    """All but notes."""
    return [f for f in subject.findings if f.verdict != NOTE]


def masked(per_element: Tensor) -> tuple[Tensor, Tensor]:
    """All rows but the first of each micro-batch count."""
    return per_element, (torch.arange(len(per_element)) > 0).double()[:, None].expand_as(per_element)


def masked_mean(x: Tensor, y: Tensor) -> Tensor:
    error, mask = masked((x - y).square())
    return (error * mask).sum() / mask.sum()


def masked_by_number(x: Tensor, y: Tensor) -> Tensor:
    error, mask = masked((x - y).abs())
    return (error * mask).sum() / int(mask.sum())


def negated(x: Tensor, y: Tensor) -> Tensor:
    return -(x.log_softmax(-1) * y.softmax(-1)).sum() / len(x)


LOSSES: dict[str, tuple[Loss, str]] = {
    "mse": (F.mse_loss, "15, 6"),
    "mse of a module": (nn.MSELoss(), "15, 6"),
    "l1": (F.l1_loss, "15, 6"),
    "smooth l1": (F.smooth_l1_loss, "15, 6"),
    "huber": (F.huber_loss, "15, 6"),
    "binary cross-entropy": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), "15, 6"),
    "with logits": (F.binary_cross_entropy_with_logits, "15, 6"),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), "5, 2"),
    "classes as probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(-1)), "5, 2"),
    "poisson": (F.poisson_nll_loss, "15, 6"),
    "by hand": (lambda x, y: (x - y).square().mean(), "15, 6"),
    "row by row, then over rows": (lambda x, y: (x - y).square().sum(-1).mean(), "5, 2"),
    "masked": (masked_mean, "12, 3"),
    "masked, by a number": (masked_by_number, "12, 3"),
    "negated": (negated, "5, 2"),
    "times two": (lambda x, y: 2 * F.mse_loss(x, y), "15, 6"),
    "with a penalty": (lambda x, y: F.mse_loss(x, y) + 0.1 * x.norm(), "15, 6"),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_that_divide_by_their_own_counts_are_named(tmp_path: Path, name: str) -> None:
    loss, counts = LOSSES[name]
    subject = watch(tmp_path, loss, (5, 2))
    assert [f.bug for f in subject.findings] == ["mean-of-means"]
    (found,) = subject.findings
    assert found.verdict == BUG
    assert found.sentence.startswith("step 1: the mean at verify/tests/test_means.py:")
    assert found.sentence.endswith(f"between micro-batches (each divides by its own number of elements: {counts})")
    large, small = (float(n) for n in counts.split(", "))
    assert dict(found.coefficients) == pytest.approx(
        {"rank 0, micro-batch 0": (large + small) / 2 / large, "rank 0, micro-batch 1": (large + small) / 2 / small}
    )
    assert found.tensors == ("weight", "bias")


@pytest.mark.medium
@pytest.mark.parametrize("name", LOSSES)
def test_equal_counts_are_right(tmp_path: Path, name: str) -> None:
    subject = watch(tmp_path, LOSSES[name][0], (4, 4))
    assert (subject.verdict, subject.findings) == (PASS, [])
    assert Recording(tmp_path).ranks[0].of(MeanWeight), "the means were seen"


def test_a_mean_that_is_weighed_by_its_rows_is_right(tmp_path: Path) -> None:
    assert watch(tmp_path, F.mse_loss, (5, 2), scale=lambda n: n / 7).findings == []


def test_a_sum_over_the_count_of_all_is_right(tmp_path: Path) -> None:
    assert watch(tmp_path, lambda x, y: (x - y).square().sum() / 21, (5, 2), scale=lambda n: 1.0).findings == []
    assert judged(watch(tmp_path / "2", lambda x, y: F.mse_loss(x, y, reduction="sum"), (5, 2))) == []


def each_row_alike(x: Tensor, y: Tensor) -> Tensor:
    """Row i has i + 1 elements that count: the mean over rows of the mean over each."""
    means = []
    for i, error in enumerate((x - y).square()):
        means.append(error[: 1 + i % WIDTH].mean())
    return torch.stack(means).sum() / 7


def centred(x: Tensor, y: Tensor) -> Tensor:
    """A mean that is no loss: what comes back to it depends on the data."""
    return (x / x.abs().mean() - y).square().sum() / 21


def unlike(x: Tensor, y: Tensor) -> Tensor:
    """Weights that sum to one on each micro-batch: no count."""
    weights = y[:, :1]
    return (weights * x).sum() / weights.sum()


RIGHT: dict[str, Loss] = {"each row alike": each_row_alike, "no loss": centred, "no count": unlike}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_no_mean_of_means_is_not_called_so(tmp_path: Path, name: str) -> None:
    assert judged(watch(tmp_path, RIGHT[name], (5, 2), scale=lambda n: 1.0)) == []


def test_two_losses_with_batches_of_their_own_are_two_means(tmp_path: Path) -> None:
    """As a judge of real and made samples has them: each mean is over all of its own."""
    torch.manual_seed(0)
    judge = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)

    def loss(x: Tensor, real: bool) -> Tensor:
        y = judge(x)
        return F.binary_cross_entropy_with_logits(y, torch.full_like(y, float(real)))

    with Capture(tmp_path, steps=1):
        loss(rows(6), real=True).backward()
        loss(rows(3), real=False).backward()
        optimizer.step()
    assert inspect(tmp_path).findings == []


def test_labels_are_looked_at_rather_than_elements(tmp_path: Path) -> None:
    """A penalty beside a right cross-entropy may be a mean of means on purpose."""
    torch.manual_seed(0)
    model = nn.Linear(4, WIDTH).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path, steps=1):
        for n in (5, 2):
            x = model(rows(n))
            right = F.cross_entropy(x, torch.zeros(n, dtype=torch.long), reduction="sum") / 7
            (right + 0.1 * x.square().mean()).backward()
        optimizer.step()
    assert inspect(tmp_path).findings == []


def test_means_without_a_gradient_are_not_looked_at(tmp_path: Path) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            (x - y).square().mean()
        (x - y).abs().detach().mean()
        return (x - y).square().sum() / 21

    watch(tmp_path, loss, (5, 2))
    assert [e.term.split()[0] for e in Recording(tmp_path).ranks[0].of(MeanWeight)] == ["div", "sum"] * 4
