"""Terms of a loss are told with their weights, and the balance of experts is judged: one process, tiny programs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.terms import amounts, too_often
from isograd_verify.record.events import LossTerm
from isograd_verify.record.recording import Recording
from isograd_verify.run.attach import inspect
from isograd_verify.tell.findings import BUG, NOTE, Finding
from isograd_verify.watch.capture import Capture

from .recordings import Held, Step, numbers, write

EXPERTS, MICROS = 4, 3


class Router(nn.Module):
    """A model with a choice bias, counts, and a balance loss whose coefficient its config tells."""

    expert_bias: Tensor
    tokens_per_expert: Tensor
    running: Tensor

    def __init__(self, plant: str, coefficient: float | None = 0.25) -> None:
        super().__init__()
        self.plant, self.runs = plant, 0
        if coefficient is not None:
            self.config = SimpleNamespace(
                router_aux_loss_coef=coefficient, output_router_logits=True, num_experts=EXPERTS
            )
        self.router = nn.Linear(5, EXPERTS)
        self.head = nn.Linear(5, 7)
        for name in ("expert_bias", "tokens_per_expert", "running"):
            self.register_buffer(name, torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.runs = 0
        scores = self.router(x).softmax(-1)
        kept = checkpoint(self.layer, x, scores, use_reentrant=False)
        balance = EXPERTS * (scores.detach().mean(0) * scores.mean(0)).sum()
        return self.head(kept), balance

    def layer(self, x: Tensor, scores: Tensor) -> Tensor:
        self.runs += 1
        noise = 9 * torch.eye(EXPERTS)[self.runs] if self.plant == "chooses anew" else 0
        chosen = (scores.detach() + self.expert_bias + noise).topk(2, dim=-1).indices
        self.running += 0.1  # as a norm's running mean, which is nobody's count of tokens
        if self.plant == "counts again" or self.runs == 1:
            self.tokens_per_expert += chosen.flatten().bincount(minlength=EXPERTS)
        return x * scores.gather(1, chosen).sum(1, keepdim=True)


def watch(home: Path, plant: str = "", coefficient: float | None = 0.25) -> list[Finding]:
    torch.manual_seed(0)
    model = Router(plant, coefficient)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(home, steps=2):
        for _ in range(2):
            counts = range(3, 3 + MICROS)
            for rows in counts:
                logits, balance = model(torch.randn(rows, 5))
                loss = F.cross_entropy(logits, torch.arange(rows), reduction="sum") / sum(counts)
                share = 1 if plant == "balance is added for each" else MICROS
                (loss + 0.25 * (balance / share)).backward()
                if plant == "moves with each":
                    model.expert_bias += 0.01
            optimizer.step()
            optimizer.zero_grad()
            model.expert_bias += 0.01
            model.tokens_per_expert.zero_()
    return [f for f in inspect(home).findings if f.verdict != NOTE]


def test_a_right_program_with_a_balance_loss_a_bias_and_counts_passes(tmp_path: Path) -> None:
    assert watch(tmp_path) == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("plant", "bug", "words"),
    [
        ("balance is added for each", "aux-times-micro", "counts 3 times where the labels count once"),
        ("moves with each", "bias-per-micro", "expert_bias changes between the micro-batches"),
        ("counts again", "bias-twice", "tokens_per_expert changes in a forward, and again in its backward"),
        ("chooses anew", "recompute-flip", "(3 times at "),
    ],
)
def test_what_is_planted_is_named_and_nothing_else_is(tmp_path: Path, plant: str, bug: str, words: str) -> None:
    (found,) = watch(tmp_path, plant)
    assert (found.verdict, found.bug) == (BUG, bug)
    assert words in found.sentence


def test_without_a_config_nothing_says_how_often_a_balance_loss_is_to_count(tmp_path: Path) -> None:
    assert watch(tmp_path, "balance is added for each", coefficient=None) == []


def terms_of(home: Path, loss) -> list[LossTerm]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self) -> Tensor:
            return self.weight * 1.0

    with Capture(home, steps=1):
        loss(Model()()).backward()
        torch.optim.SGD([weight], lr=0.1).step()
    return Recording(home).ranks[0].of(LossTerm)


def test_a_term_is_told_with_its_value_and_the_weights_on_its_way_to_the_loss(tmp_path: Path) -> None:
    def loss(x: Tensor) -> Tensor:
        main = x.sum() / 4
        return (main + 0.5 * (x.square().mean() - x.max())) * 2

    found = sorted(terms_of(tmp_path, loss), key=lambda term: term.value)
    assert [(t.value, t.weights, t.joined) for t in found] == [
        (3.0, (-1.0, 1.0, 2.0, 2.0, 1.0), 1),
        (pytest.approx(14 / 3), (1.0, 1.0, 2.0, 2.0, 1.0), 1),
        (6.0, (0.5, 2.0, 2.0, 1.0), 2),
    ]
    assert [t.share for t in found] == pytest.approx([-3.0, 14 / 3, 3.0])


def test_terms_that_are_added_in_place_and_a_loss_of_one_term_are_told(tmp_path: Path) -> None:
    def loss(x: Tensor) -> Tensor:
        total = x.sum() / 3
        total += 0.1 * x.prod()
        total *= 2
        return total

    found = sorted(terms_of(tmp_path / "a", loss), key=lambda term: term.weights)
    assert [t.weights[0] for t in found] == pytest.approx([0.2, 2 / 3])
    (alone,) = terms_of(tmp_path / "b", lambda x: x.square().sum() * 0.5)
    assert (alone.value, alone.weights, alone.joined) == (14.0, (0.5, 1.0), -1)


def recorded(home: Path, micros: int, layout: str = "dp2") -> Analysis:
    """Two ranks whose gradients are summed: each micro-batch has a term of value 2 with weight 0.5."""
    parts = [[numbers(4, seed=10 * rank + m) for m in range(micros)] for rank in range(2)]
    total = torch.stack([part for mine in parts for part in mine]).sum(0)
    ranks = []
    for mine in parts:
        told = [LossTerm(1, m, site="loss.py:1", value=2.0, weights=(0.5, 1.0), joined=1) for m in range(micros)]
        ranks.append([Step({"w": Held(numbers(4), total, parts=dict(enumerate(mine)))}, events=list(told))])
    return Analysis(write(home, ranks, layout), 1)


def test_what_a_term_adds_is_summed_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    assert amounts(recorded(tmp_path, 3)) == {"loss.py:1": pytest.approx(6.0)}


@pytest.mark.parametrize(
    ("micros", "factor", "bug", "axis"),
    [
        (3, 2.0, "aux-times-world", "dp"),
        (3, 3.1, "aux-times-micro", "micro-batches"),
        (3, 6.2, "aux-times-world", "dp x micro-batches"),
        (3, 0.5, "aux-over-dp", "dp"),
        (3, 5.0, "", ""),
        (2, 2.0, "aux-times-world", "dp or micro-batches"),
    ],
)
def test_a_factor_of_a_term_is_named_by_what_has_its_size(
    tmp_path: Path, micros: int, factor: float, bug: str, axis: str
) -> None:
    told = too_often(recorded(tmp_path, micros), factor)
    assert told[:2] == (bug, axis)
    assert ("equal numbers do not tell apart" in told[2]) == (axis == "dp or micro-batches")
