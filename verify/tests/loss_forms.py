"""Losses as programs write them, each summed over its labels: by hand, fused, in chunks, over a cut vocabulary.

`train` divides such a sum in one of the ways in which programs do, of which "own" and "micro" are means of means.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import isograd_verify
from isograd_verify.corpus.plain import copied, cut
from isograd_verify.watch.capture import Capture

VOCABULARY, WIDTH, ROWS = 6, 5, 9
Form = Callable[[Tensor, nn.Linear, Tensor], Tensor]  # what goes into the head, the head, labels -> a sum


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


# -- log_softmax and a choice among it ---------------------------------------------------------------------------


def chosen(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return F.log_softmax(head(hidden), -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]


def masked(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return -(chosen(hidden, head, labels) * (labels != -100)).sum()


def masked_by_rows(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Sums of rows, and their sum."""
    mask = (labels != -100).double().view(3, 3)
    return (-chosen(hidden, head, labels).view(3, 3) * mask).sum(-1).sum()


def filled(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return -chosen(hidden, head, labels).masked_fill(labels == -100, 0.0).sum()


def where(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    picked = chosen(hidden, head, labels)
    return -torch.where(labels != -100, picked, torch.zeros_like(picked)).sum()


def selected(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return -chosen(hidden, head, labels)[labels != -100].sum()


def one_hot(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    wanted = F.one_hot(labels.clamp(min=0), VOCABULARY) * (labels != -100)[:, None]
    return -(F.log_softmax(head(hidden), -1) * wanted).sum()


def policy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Clipped ratios times advantages, masked, as in PPO and GRPO."""
    mask = (labels != -100).double()
    logps = chosen(hidden, head, labels)
    ratio, advantages = torch.exp(logps - logps.detach()), torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    return -(torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum()


def checkpointed(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A chunk's masked sum is computed once more in backward."""
    parts: list[Tensor] = [
        checkpoint(masked, h, head, y, use_reentrant=False)
        for h, y in zip(hidden.chunk(3), labels.chunk(3), strict=True)
    ]
    return torch.stack(parts).sum()


def in_chunks(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    total = hidden.new_zeros(())
    for h, y in zip(hidden.chunk(3), labels.chunk(3), strict=True):
        total = total + masked(h, head, y)
    return total


# -- autograd Functions ------------------------------------------------------------------------------------------


class FusedLinear(torch.autograd.Function):
    """As Liger's: logits never exist as a whole, gradients are made in forward, backward multiplies."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, ignore_index: int) -> Tensor:
        valid = labels != ignore_index
        n = valid.sum() if reduction == "mean" else 1
        total, d_hidden, d_weight = hidden.new_zeros(()), torch.zeros_like(hidden), torch.zeros_like(weight)
        for rows in torch.arange(len(hidden)).chunk(2):
            logps = (hidden[rows] @ weight.T).log_softmax(-1)
            wanted = F.one_hot(labels[rows] * valid[rows], len(weight)) * valid[rows, None]
            total -= (logps * wanted).sum() / n
            d_logits = (logps.exp() * valid[rows, None] - wanted) / n
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.T @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None, None, None


def fused_linear(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    total: Tensor = FusedLinear.apply(hidden, head.weight, labels, "sum", -100)
    return total


def fused_linear_mean(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    mean: Tensor = FusedLinear.apply(hidden, head.weight, labels, "mean", -100)
    return mean * (labels != -100).sum()


class InnerChunks(torch.autograd.Function):
    """Gradients come from torch's cross-entropy on each chunk, inside forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        total, d_hidden, d_weight = hidden.new_zeros(()), [], torch.zeros_like(weight)
        for h, y in zip(hidden.chunk(3), labels.chunk(3), strict=True):
            with torch.enable_grad():
                leaf, matrix = h.detach().requires_grad_(), weight.detach().requires_grad_()
                loss = F.cross_entropy(leaf @ matrix.T, y, reduction="sum")
            d_leaf, d_matrix = torch.autograd.grad(loss, (leaf, matrix))
            total += loss.detach()
            d_hidden.append(d_leaf)
            d_weight += d_matrix
        ctx.save_for_backward(torch.cat(d_hidden), d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None


def inner_chunks(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    total: Tensor = InnerChunks.apply(hidden, head.weight, labels)
    return total


class FusedRows(torch.autograd.Function):
    """A fused cross-entropy with one number for each row, zero where there is no label."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        valid = (labels != -100)[:, None]
        wanted = F.one_hot(labels.clamp(min=0), logits.shape[1]) * valid
        ctx.save_for_backward(logits.softmax(-1) * valid - wanted)
        return -(logits.log_softmax(-1) * wanted).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient[:, None], None


def fused_rows(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return FusedRows.apply(head(hidden), labels).sum()  # type: ignore[no-any-return]


class Unknown(torch.autograd.Function):
    """Something that is no cross-entropy: only its program knows of how many numbers it is made."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        valid = (labels != -100)[:, None].double()
        ctx.save_for_backward(2 * logits * valid)
        return (logits.square() * valid).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None


def unknown(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    total: Tensor = Unknown.apply(head(hidden), labels)
    return total


def weighed(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    total = unknown(hidden, head, labels)
    return isograd_verify.weigh(total, (labels != -100).sum(), reduction="sum")


def squares(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A masked squared error."""
    error = F.mse_loss(head(hidden)[:, 0], labels.double(), reduction="none")
    return (error * (labels != -100)).sum()


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        masked, masked_by_rows, filled, where, selected, one_hot, policy, checkpointed, in_chunks, fused_linear,
        fused_linear_mean, inner_chunks, fused_rows, weighed, squares,
    )
}  # fmt: skip


DIVISORS = ("all", "own", "micro")

# -- the program -------------------------------------------------------------------------------------------------


def batch(micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows of a rank's own, with another number of labels in each micro-batch on each rank."""
    generator = torch.Generator().manual_seed(10 * micro + rank)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[: 1 + 2 * rank + 3 * micro] = -100
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64), labels


def everyone(count: Tensor | float) -> Tensor:
    total = torch.as_tensor(count).double().clone()
    dist.all_reduce(total)
    return total


def train(form: Form, divisor: str) -> None:
    """DDP with two micro-batches. `divisor`: 'all' labels of the step, which is right; the rank's 'own' labels of the
    micro-batch; or those of the 'micro'-batch on all ranks. No divisor is a whole number."""
    torch.manual_seed(0)
    plain = Scorer().double()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = dist.get_world_size()
    batches = [batch(micro, dist.get_rank()) for micro in range(2)]
    whole = everyone(sum((labels != -100).sum() for _, labels in batches))
    for micro, (x, labels) in enumerate(batches):
        count = (labels != -100).sum()
        by = {"all": whole / world, "own": 2 * count, "micro": 2 * everyone(count) / world}[divisor]
        with model.no_sync() if not micro else nullcontext():
            (form(model(x), plain.head, labels) / (1.7 * by)).backward()
    optimizer.step()


def watched(home: str) -> None:
    """Every form, each divisor in a folder of its own."""
    for name, form in {**FORMS, "unknown": unknown}.items():
        for divisor in DIVISORS if form in (masked, fused_linear) else DIVISORS[:2]:
            with Capture(Path(home) / f"{name}-{divisor}", steps=1, lenient=True):
                train(form, divisor)


# -- a backward inside a forward ---------------------------------------------------------------------------------


class Tiled(torch.autograd.Function):
    """As DeepSpeed's tiled losses: forward calls backward tile by tile, which adds to the head's gradient at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: nn.Linear, labels: Tensor, divisor: float) -> Tensor:
        total, pieces = hidden.new_zeros(()), []
        for h, y in zip(hidden.chunk(3), labels.chunk(3), strict=True):
            leaf = h.detach().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(F.linear(leaf, head.weight), y, reduction="sum") / divisor
            torch.autograd.backward(loss)
            pieces.append(leaf.grad)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(pieces))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None, None, None


def watched_tiles(home: Path, divisor: str) -> None:
    """On one process, with two micro-batches."""
    torch.manual_seed(0)
    model = Scorer().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch(micro, rank=0) for micro in range(2)]
    total = sum(int((labels != -100).sum()) for _, labels in batches)
    with Capture(home, steps=1):
        for x, labels in batches:
            by = total if divisor == "all" else 2 * int((labels != -100).sum())
            Tiled.apply(model(x), model.head, labels, by).backward()
        optimizer.step()


# -- a vocabulary that is cut over two ranks ---------------------------------------------------------------------


class VocabularyParallel(torch.autograd.Function):
    """Megatron's cross-entropy of logits that are cut over ranks: one number for each row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        first = dist.get_rank() * logits.shape[1]
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        shifted = logits - top[:, None]
        total = everyone(shifted.exp().sum(-1))
        here = (labels >= first) & (labels < first + logits.shape[1])
        wanted = F.one_hot((labels - first) * here, logits.shape[1]) * here[:, None]
        ctx.save_for_backward(shifted.exp() / total[:, None] - wanted)
        return total.log() - everyone((shifted * wanted).sum(-1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient[:, None], None


def train_cut(divisor: str) -> None:
    """Two micro-batches. `divisor`: 'all' labels of the step, or each micro-batch's 'own', which is a mean of means."""
    torch.manual_seed(0)
    body, whole = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, VOCABULARY, bias=False).double()
    head = cut(whole, 0)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    batches = [batch(micro, rank=0) for micro in range(2)]
    total = sum((labels != -100).sum() for _, labels in batches)
    for x, labels in batches:
        losses = VocabularyParallel.apply(head(copied(torch.tanh(body(x)))), labels.clamp(min=0))
        mask = (labels != -100).double()
        loss = (losses.view(-1) * mask.view(-1)).sum() / (1.7 * (total if divisor == "all" else 2 * mask.sum()))
        loss.backward()
    optimizer.step()


def watched_cut(home: str) -> None:
    for divisor in ("all", "own"):
        with Capture(Path(home) / f"cut-{divisor}", steps=1, lenient=True):
            train_cut(divisor)
