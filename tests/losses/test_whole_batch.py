"""Each loss on random batches beside a definition of its own, written here, token by token on the whole batch.

Where the mask leaves a token out, advantages, ratios, references, returns and old values are NaN or infinite. Rows are
packed and padded, sequences and prompts without a token are among them, and a batch is cut into parts of rows, some of
them empty, and into parts of places. A step's loss is the sum of value * weight over the sum of weights, as in engines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd import losses
from isograd.errors import EngineError

VOCAB, LENGTH = 5, 9
Token = tuple[int, int]


class Batch:
    """Random numbers; `tokens`: the places of each sequence that count."""

    def __init__(self, seed: int) -> None:
        draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.rows = draw.randint(1, 6)
        shape = (self.rows, LENGTH)
        self.documents, self.mask = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
        self.tokens: list[list[Token]] = []
        self.prompt_of: list[int] = []
        self.prompts = torch.zeros(shape, dtype=torch.int64)
        self.number = draw.randint(1, 3)
        for row in range(self.rows):
            at, document = 0, draw.choice([0, 3])
            while at < LENGTH and draw.random() < 0.85:
                end, prompt = min(LENGTH, at + draw.randint(1, 5)), draw.randrange(self.number)
                rate = draw.choice([0.0, 0.5, 1.0])
                kept = [place for place in range(at, end) if draw.random() < rate]
                self.documents[row, at:end], self.prompts[row, at:end] = document, prompt
                self.mask[row, kept] = True
                self.tokens.append([(row, place) for place in kept])
                self.prompt_of.append(prompt)
                at, document = end, document + draw.randint(1, 2)
        self.padded = self.mask | (torch.rand(shape, generator=g) < 0.3) & (
            self.documents < 0
        )  # a mask that keeps padding

        def numbers(*more: int) -> Tensor:
            return torch.randn(*shape, *more, generator=g, dtype=torch.float64)

        def spoiled(scale: float = 1.0) -> Tensor:
            bad = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(3, shape, generator=g)]
            return torch.where(self.mask, scale * numbers(), bad.double())

        self.logits, self.values, self.y = numbers(VOCAB), numbers(), torch.randint(VOCAB, shape, generator=g)
        self.teacher, self.advantages, self.returns, self.old_values = numbers(VOCAB), spoiled(), spoiled(), spoiled()
        self.old, self.reference = spoiled(0.4) - 1.6, spoiled(0.4) - 1.6


def leaves(b: Batch) -> tuple[Tensor, Tensor]:
    return b.logits.clone().requires_grad_(), b.values.clone().requires_grad_()


def logp_of(b: Batch, logits: Tensor) -> Tensor:
    """With NaN where nothing counts, as a kernel that skips padding leaves it."""
    found = logits.log_softmax(-1).gather(-1, b.y[..., None])[..., 0]
    return found.masked_fill(~b.mask, math.nan)


def _softmax(numbers: Tensor) -> Tensor:
    return numbers.exp() / numbers.exp().sum()


def _ppo(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    kept = min(max(ratio, ratio * 0 + 1 - low), ratio * 0 + 1 + high)
    return -min(ratio * a, kept * a)


# Each: (the loss of all tokens, ours; that of one token, by its definition)
Ours = Callable[[Batch, Tensor, Tensor, Tensor], Tensor]
One = Callable[[Batch, Token, Tensor, Tensor, Tensor], Tensor]


def _clipped(b: Batch, t: Token, logp: Tensor, low: float, high: float) -> Tensor:
    return _ppo((logp - b.old[t]).exp(), float(b.advantages[t]), low, high)


def _dual(b: Batch, t: Token, logp: Tensor) -> Tensor:
    found, a = _clipped(b, t, logp, 0.2, 0.28), float(b.advantages[t])
    return min(found, found * 0 - 1.1 * a) if a < 0 else found


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def _jensen(p: Tensor, q: Tensor) -> Tensor:
    both = 0.3 * q + 0.7 * p
    return 0.3 * _kl(q, both) + 0.7 * _kl(p, both)


def _value(b: Batch, t: Token, v: Tensor, near: bool) -> Tensor:
    error = (v - b.returns[t]) ** 2
    if near:
        old = float(b.old_values[t])
        error = max(error, (min(max(v, v * 0 + old - 0.2), v * 0 + old + 0.2) - b.returns[t]) ** 2)
    return error / 2


LOSSES: dict[str, tuple[Ours, One]] = {
    "ppo": (lambda b, p, z, v: losses.clip(p - b.old, b.advantages), lambda b, t, p, z, v: _clipped(b, t, p, 0.2, 0.2)),
    "dapo": (
        lambda b, p, z, v: losses.clip(p - b.old, b.advantages, 0.2, 0.28, dual=1.1),
        lambda b, t, p, z, v: _dual(b, t, p),
    ),
    "one side": (
        lambda b, p, z, v: losses.clip(p - b.old, b.advantages, 1.0, 0.0),
        lambda b, t, p, z, v: _clipped(b, t, p, 1.0, 0.0),
    ),
    "k1": (lambda b, p, z, v: losses.kl(p, b.reference, "k1"), lambda b, t, p, z, v: p - b.reference[t]),
    "k2": (lambda b, p, z, v: losses.kl(p, b.reference, "k2"), lambda b, t, p, z, v: (p - b.reference[t]) ** 2 / 2),
    "k3": (
        lambda b, p, z, v: losses.kl(p, b.reference),
        lambda b, t, p, z, v: (b.reference[t] - p).exp() - 1 - (b.reference[t] - p),
    ),
    "entropy": (lambda b, p, z, v: losses.entropy(z), lambda b, t, p, z, v: -(_softmax(z) * _softmax(z).log()).sum()),
    "value": (lambda b, p, z, v: losses.value(v, b.returns), lambda b, t, p, z, v: _value(b, t, v, near=False)),
    "value, clipped": (
        lambda b, p, z, v: losses.value(v, b.returns, b.old_values),
        lambda b, t, p, z, v: _value(b, t, v, near=True),
    ),
    "to the teacher": (
        lambda b, p, z, v: losses.distil(z, b.teacher, temperature=2.0),
        lambda b, t, p, z, v: 4 * _kl(_softmax(b.teacher[t] / 2), _softmax(z / 2)),
    ),
    "from the teacher": (
        lambda b, p, z, v: losses.distil(z, b.teacher, "reverse"),
        lambda b, t, p, z, v: _kl(_softmax(z), _softmax(b.teacher[t])),
    ),
    "to both": (
        lambda b, p, z, v: losses.distil(z, b.teacher, "between", mix=0.3),
        lambda b, t, p, z, v: _jensen(_softmax(z), _softmax(b.teacher[t])),
    ),
}  # fmt: skip


def shares(b: Batch, kind: str) -> losses.Share:
    if kind == "tokens":
        return losses.of_tokens(b.mask)
    if kind == "sequences":
        return losses.of_sequences(b.padded, b.documents)
    if kind == "length":
        return losses.of_length(b.padded, 4, b.documents)
    counts = torch.zeros(b.number, dtype=torch.float64)
    for prompt, tokens in zip(b.prompt_of, b.tokens, strict=True):
        counts[prompt] += len(tokens)
    return losses.of_prompts(b.mask, b.prompts, counts)


def weights(b: Batch, kind: str) -> dict[Token, float]:
    """How much each token's loss counts in the mean; none counts where there is nothing to take a mean of."""
    every = [t for tokens in b.tokens for t in tokens]
    full = [tokens for tokens in b.tokens if tokens]
    if kind == "tokens":
        return {t: 1 / len(every) for t in every}
    if kind == "sequences":
        return {t: 1 / (len(tokens) * len(full)) for tokens in full for t in tokens}
    if kind == "length":
        return {t: 1 / (4 * len(b.tokens)) for t in every}
    groups = [[t for p, tokens in zip(b.prompt_of, b.tokens, strict=True) if p == prompt for t in tokens]
              for prompt in set(b.prompt_of)]  # fmt: skip
    groups = [group for group in groups if group]
    return {t: 1 / (len(group) * len(groups)) for group in groups for t in group}


def cuts(b: Batch, seed: int) -> list[tuple[slice, slice]]:
    """Parts of rows, empty ones among them, and in one of them parts of places."""
    draw = random.Random(seed)
    edges = sorted([0, b.rows, *(draw.randint(0, b.rows) for _ in range(3))])
    middle = draw.randint(0, LENGTH)
    parts = [(slice(a, z), slice(0, LENGTH)) for a, z in pairwise(edges)]
    return [(parts[0][0], slice(0, middle)), (parts[0][0], slice(middle, LENGTH)), *parts[1:]]


def mean_of(pairs: list[tuple[Tensor, Any]]) -> Tensor:
    total = sum(float(weight) for _, weight in pairs)
    return sum((value.double() * weight for value, weight in pairs if weight), torch.zeros(()).double()) / (total or 1)


def near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11), what


def gradients(loss: Tensor, of: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not loss.requires_grad:
        return tuple(torch.zeros_like(x) for x in of)
    found = torch.autograd.grad(loss, of, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, of, strict=True))


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["tokens", "sequences", "length", "prompts"])
def test_every_loss_of_tokens_under_every_mean_is_its_definition_however_the_batch_is_cut(kind: str) -> None:
    for seed in range(12):
        b = Batch(seed)
        share, counted = shares(b, kind), weights(b, kind)
        for name, (ours, one) in LOSSES.items():
            logits, values = leaves(b)
            logp = logits.log_softmax(-1)
            each = [w * one(b, t, logp[t][b.y[t]], logits[t], values[t]) for t, w in counted.items()]
            expected = torch.stack(each).sum() if each else torch.zeros(()).double()
            wanted = gradients(expected, (logits, values))
            logits, values = leaves(b)
            mine = ours(b, logp_of(b, logits), logits, values)
            pairs = [losses.mean(mine[at], losses.Share(share.factors[at], share.counts[at])) for at in cuts(b, seed)]
            found = mean_of(pairs)
            near((found, *gradients(found, (logits, values))), (expected, *wanted), f"{name}, {kind}, {seed}")


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _pair(kind: str, c: Tensor, r: Tensor, known_c: Tensor, known_r: Tensor) -> Tensor:
    """Of the log probabilities of the tokens of two answers."""
    margin = c.sum() - r.sum() - (known_c.sum() - known_r.sum())
    if kind == "simpo":
        return -_sigmoid(2.0 * (c.mean() - r.mean()) - 1.0).log()
    if kind == "orpo":
        p, q = c.mean().exp(), r.mean().exp()
        return -_sigmoid((p / (1 - p) / (q / (1 - q))).log()).log()
    wrong = {"dpo": 0.0, "smoothed": 0.2}.get(kind)
    if wrong is None:
        return (margin - 1 / (2 * 0.3)) ** 2
    return -(1 - wrong) * _sigmoid(0.3 * margin).log() - wrong * _sigmoid(-0.3 * margin).log()


def _term(kind: str, b: Batch, logp: Tensor, rows: slice) -> tuple[Tensor, Any]:
    """Of some rows, by the functions that are tested."""
    logp, mask, documents = logp[rows], b.mask[rows], b.documents[rows]
    if kind == "gspo":
        numbers = losses.numbered(mask, documents)
        ratio = losses.sequence_log_ratio(logp, b.old[rows], mask, numbers, len(b.tokens) + 1)
        a = (torch.arange(b.rows, dtype=torch.float64)[rows, None] % 2) * 1.8 - 1.1
        return losses.mean(losses.clip(ratio, a, 0.1, 0.1), losses.of_sequences(mask, documents))
    gather = losses.sequence_means if kind in ("simpo", "orpo") else losses.sequence_sums
    answers = gather(logp, mask, losses.numbered(mask), len(mask))
    known = gather(b.reference[rows], mask, losses.numbered(mask), len(mask))
    if kind == "kto":
        liked = torch.arange(b.rows)[rows] % 2 == 1
        one = losses.kto(answers, known, liked, torch.tensor([0.2]), weights=(2.0, 1.0))
    elif kind in ("simpo", "orpo"):
        one = getattr(losses, kind)(answers[0::2], answers[1::2])
    else:
        more = {"smoothing": 0.2} if kind == "smoothed" else {}
        of = losses.ipo if kind == "ipo" else losses.dpo
        one = of(answers[0::2], answers[1::2], known[0::2], known[1::2], beta=0.3, **more)
    return losses.mean_of_sequences(one)


@pytest.mark.parametrize("kind", ["dpo", "smoothed", "ipo", "simpo", "orpo", "kto", "gspo"])
def test_every_loss_of_sequences_is_its_definition_however_the_batch_is_cut(kind: str) -> None:
    checked = 0
    for seed in range(24):
        b = Batch(seed)
        where = [t for t in b.tokens if t]
        if kind != "gspo":  # rows are answers, each with a token
            b.rows -= b.rows % 2
            where = [[(row, place) for place in range(LENGTH) if b.mask[row, place]] for row in range(b.rows)]
            where = where if all(where) else []
        if not where:
            continue
        checked += 1
        logits, _ = leaves(b)
        logp = logits.log_softmax(-1)
        mine = [torch.stack([logp[t][b.y[t]] for t in tokens]) for tokens in where]
        known = [torch.stack([b.reference[t] for t in tokens]) for tokens in where]
        if kind == "gspo":
            each = []
            for tokens, one in zip(where, mine, strict=True):
                old = torch.stack([b.old[t] for t in tokens])
                a = 0.7 if tokens[0][0] % 2 else -1.1
                each.append(_ppo((one.mean() - old.mean()).exp(), a, 0.1, 0.1))
        elif kind == "kto":
            rewards = [a.sum() - k.sum() for a, k in zip(mine, known, strict=True)]
            each = [
                2.0 * (1 - _sigmoid(0.1 * (x - 0.2))) if i % 2 else 1 - _sigmoid(0.1 * (0.2 - x))
                for i, x in enumerate(rewards)
            ]
        else:
            each = [_pair(kind, mine[i], mine[i + 1], known[i], known[i + 1]) for i in range(0, len(where), 2)]
        expected = torch.stack(each).mean()
        wanted = gradients(expected, (logits,))

        logits, _ = leaves(b)
        whole = logp_of(b, logits)
        found = mean_of([_term(kind, b, whole, rows) for rows in (slice(0, 2), slice(2, 2), slice(2, b.rows))])
        near((found, *gradients(found, (logits,))), (expected, *wanted), f"{kind}, {seed}")
    assert checked > 5


def test_a_token_that_counts_keeps_its_nan() -> None:
    """Then the norm is NaN, and all ranks skip the step."""
    mask = torch.tensor([[True, True]])
    for bad in ((math.nan, 1.0), (math.inf, 1.0)):
        logp = torch.zeros(1, 2, requires_grad=True)
        value, _ = losses.mean(losses.clip(logp, torch.tensor([bad])), losses.of_tokens(mask))
        value.backward()
        assert logp.grad is not None and not bool(logp.grad.isfinite().all()) and not bool(value.isfinite())


def test_a_ratio_that_overflows_has_the_gradient_of_its_bound() -> None:
    """exp(200) is infinite in float32, and infinity times an advantage of 0, or times a slope of 0, is NaN."""
    ratio = torch.tensor([200.0, 200.0, 200.0, -200.0], requires_grad=True)
    loss = losses.clip(ratio, torch.tensor([0.0, 2.0, -2.0, -2.0]), dual=3.0)
    assert loss.tolist() == pytest.approx([0.0, -2.4, 6.0, 1.6])
    assert torch.autograd.grad(loss.sum(), ratio)[0].tolist() == [0.0] * 4


def test_what_is_known_takes_no_gradient() -> None:
    """Old log probabilities or a reference with a graph would move what they stand for, or cancel the loss."""
    x, known = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]], requires_grad=True)
    for make in (
        losses.kl, lambda p, k: losses.kl(p, k, "k2"), lambda p, k: losses.value(p, k, k),
        losses.clip, lambda p, k: losses.kto(p, k, k < 0, k.sum()),
        lambda p, k: losses.dpo(p, p * 2, k, k * 2), lambda p, k: losses.ipo(p, p * 2, k, k * 2),
    ):  # fmt: skip
        mine = x.clone().requires_grad_()
        assert torch.autograd.grad(make(mine, known).sum(), (mine, known), allow_unused=True)[1] is None


def test_rewards_in_half_precision_are_added_up_in_full() -> None:
    rewards = torch.tensor([1.0] * 999 + [0.0]).bfloat16()
    found = losses.group_advantages(rewards, torch.zeros(1000, dtype=torch.int64), scale=False)
    assert found[0].item() == pytest.approx(1e-3, rel=1e-5) and found[-1].item() == pytest.approx(-0.999, rel=1e-5)


def test_logits_in_half_precision_have_the_entropy_of_their_numbers() -> None:
    logits = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)).bfloat16()
    truth = losses.entropy(logits.double())
    assert float(losses.entropy(logits)) == pytest.approx(float(truth), rel=1e-5)
    teacher = logits.flip(1)
    apart = losses.distil(logits.double(), teacher.double(), temperature=3.0)
    assert float(losses.distil(logits, teacher, temperature=3.0)) == pytest.approx(float(apart), rel=1e-4)


def test_a_sequence_in_two_pieces_is_one_of_a_constant_length() -> None:
    share = losses.of_length(torch.zeros(1, 3, dtype=torch.bool), 4, torch.tensor([[0, 1, 0]]))
    assert share.counts.tolist() == [[1.0, 1.0, 0.0]]


def test_labels_are_no_mask_of_sequences_and_a_baseline_is_one_number() -> None:
    values, labels = torch.zeros(1, 3), torch.tensor([[-100, 5, 7]])
    with pytest.raises(EngineError, match="IG576"):
        losses.sequence_sums(values, labels, torch.zeros(1, 3, dtype=torch.int64), 1)
    with pytest.raises(EngineError, match="IG577"):
        losses.kto(values[0], values[0], values[0] < 1, torch.zeros(3, 1))
