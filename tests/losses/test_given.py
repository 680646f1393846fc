"""What is no mask, does not fit, or would be another loss, is refused by name; what is rounded or padded is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import isograd as ig
from isograd import losses
from isograd.errors import EngineError

MASK = torch.tensor([[True, True, False, True], [True, True, True, False]])
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
V = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
ONE = torch.tensor([-1.0, -2.0])

WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "labels as a mask": ("IG576", lambda: losses.of_tokens(torch.tensor([[-100, 5, 7]]))),
    "weights as a mask": ("IG576", lambda: losses.of_sequences(0.5 * MASK)),
    "NaN in a mask": ("IG576", lambda: losses.of_tokens(MASK * torch.nan)),
    "a list as a mask": ("IG576", lambda: losses.of_tokens([[True]])),  # type: ignore[arg-type]
    "a mask of one row": ("IG576", lambda: losses.of_tokens(MASK[0])),
    "documents of another shape": ("IG575", lambda: losses.of_sequences(MASK, torch.zeros(2, 3, dtype=torch.int64))),
    "documents that are not whole": ("IG576", lambda: losses.numbered(MASK, torch.zeros(2, 4))),
    "a length of 0": ("IG577", lambda: losses.of_length(MASK, 0)),
    "a prompt below 0": ("IG576", lambda: losses.of_prompts(MASK, torch.tensor([0, -1]), torch.tensor([3.0, 3.0]))),
    "a prompt too many": ("IG576", lambda: losses.of_prompts(MASK, torch.tensor([0, 2]), torch.tensor([3.0, 3.0]))),
    "too few tokens": ("IG576", lambda: losses.of_prompts(MASK, torch.tensor([0, 1]), torch.tensor([3.0, 1.0]))),
    "too few sequences": ("IG576", lambda: losses.sequence_sums(X, MASK, losses.numbered(MASK), 1)),
    "values of another shape": ("IG575", lambda: losses.sequence_sums(X[:, :1], MASK, losses.numbered(MASK), 2)),
    "losses in rows": ("IG577", lambda: losses.mean_of_sequences(X)),
    "a kind of kl": ("IG577", lambda: losses.kl(X, X, "K1")),  # type: ignore[arg-type]
    "a kl that broadcasts": ("IG575", lambda: losses.kl(X, X[:, :1])),
    "advantages over columns": ("IG575", lambda: losses.clip(X[:, :2], torch.ones(2))),
    "a clip that is turned around": ("IG577", lambda: losses.clip(X, torch.tensor(1.0), low=2.0)),
    "a dual below 1": ("IG577", lambda: losses.clip(X, torch.tensor(1.0), dual=0.5)),
    "returns of rows": ("IG575", lambda: losses.value(X, X[:, :1])),
    "prompts below 0": ("IG576", lambda: losses.group_advantages(ONE, torch.tensor([0, -1]))),
    "a kind of distillation": ("IG577", lambda: losses.distil(V, V, "Reverse")),  # type: ignore[arg-type]
    "a teacher of one word": ("IG575", lambda: losses.distil(V, V[..., :1])),
    "a mix of one": ("IG577", lambda: losses.distil(V, V, "between", mix=1.0)),
    "no temperature": ("IG577", lambda: losses.distil(V, V, temperature=0.0)),
    "smoothing of all": ("IG577", lambda: losses.dpo(ONE, ONE, ONE, ONE, smoothing=2.0)),
    "a beta below 0": ("IG577", lambda: losses.simpo(ONE, ONE, beta=-1.0)),
    "pairs that broadcast": ("IG575", lambda: losses.dpo(ONE, ONE[:1], ONE, ONE)),
    "desirable as numbers": ("IG577", lambda: losses.kto(ONE, ONE, torch.tensor([1, 0]), 0.0)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_would_be_another_loss_is_refused(case: str) -> None:
    code, make = WRONG[case]
    with pytest.raises(EngineError, match=code):
        make()


def test_a_misspelled_kind_is_told_the_nearest() -> None:
    with pytest.raises(EngineError, match="did you mean 'reverse'"):
        losses.distil(V, V, "Reverse")  # type: ignore[arg-type]


def test_padding_that_the_mask_keeps_counts_nowhere() -> None:
    mask, documents = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, -1]])
    for share in (losses.of_sequences(mask, documents), losses.of_length(mask, 2, documents)):
        assert share.factors.tolist() == [[0.5, 0.5, 1.0 if share.factors is share.counts else 0.5, 0.0]]
        assert float(share.counts.sum()) == 2.0
    sequences = losses.numbered(mask, documents)
    ratio = losses.sequence_log_ratio(X[:1], X[1:], mask, sequences, 2)
    assert float(ratio[0, 3]) == 0.0 and float(ratio[0, 2]) == pytest.approx(float(X[0, 2] - X[1, 2]))


def test_sums_in_half_precision_do_not_stop_growing() -> None:
    values = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)).abs().bfloat16()
    mask = torch.ones(1, 4000, dtype=torch.bool)
    expected = float(values.double().sum())
    assert float(losses.sequence_sums(values, mask, losses.numbered(mask), 1)) == pytest.approx(expected, rel=1e-6)
    mean, weight = losses.mean(values, losses.of_tokens(mask))
    assert float(mean * weight) == pytest.approx(expected, rel=1e-6)


def test_words_that_cannot_come_have_no_gradient_and_make_none_nan() -> None:
    logits = V.double().masked_fill(torch.arange(5) == 3, -torch.inf).requires_grad_()
    teacher = V.flip(0).double().masked_fill(torch.arange(5) == 3, -torch.inf)
    kept = [0, 1, 2, 4]
    plain = V.double()[..., kept].requires_grad_()
    makers: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, _: losses.entropy(x),
        lambda x, t: losses.distil(x, t, "forward"),
        lambda x, t: losses.distil(x, t, "reverse"),
        lambda x, t: losses.distil(x, t, "between", mix=0.3),
    ]
    for make in makers:
        found, expected = make(logits, teacher).sum(), make(plain, teacher[..., kept]).sum()
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
        mine, theirs = torch.autograd.grad(found, logits)[0], torch.autograd.grad(expected, plain)[0]
        assert float((mine[..., kept] - theirs).abs().max()) < 1e-12
        assert float(mine[..., 3].abs().max()) == 0.0


def test_a_probability_that_was_rounded_to_1_has_finite_odds() -> None:
    chosen = torch.tensor([0.0, -1.0], requires_grad=True)
    loss = losses.orpo(chosen, torch.tensor([-2.0, 0.0])).sum()
    assert bool(loss.isfinite()) and bool(torch.autograd.grad(loss, chosen)[0].isfinite().all())


def test_whole_and_boolean_rewards_are_numbers() -> None:
    prompts = torch.tensor([0, 0, 1, 1])
    expected = losses.group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), prompts).tolist()
    for dtype in (torch.int64, torch.bool):
        assert losses.group_advantages(torch.tensor([1, 0, 1, 1]).to(dtype), prompts).tolist() == expected


def counted(number: int, prompts: list[list[int]]) -> str:
    mesh = ig.Mesh("dp2")
    try:
        mask = torch.ones(2, 4, dtype=torch.bool)
        return str(
            losses.tokens_of_prompts(mask, torch.tensor(prompts[mesh.rank]), number + mesh.rank * (number > 5), mesh)
        )
    except EngineError as error:
        return error.code


def test_ranks_refuse_wrong_prompts_together(worlds) -> None:
    assert worlds(2).run(counted, 2, [[0, 1], [1, 7]]) == ["IG576", "IG576"]
    assert worlds(2).run(counted, 6, [[0, 1], [1, 0]]) == ["IG576", "IG576"]
    assert "8." in worlds(2).run(counted, 2, [[0, 1], [1, 0]])[0]
