"""The language-model head and its cross-entropy, cut over the vocabulary; full logits are never materialised.

One device: F.cross_entropy(x @ weight.T, labels, ignore_index), and how many labels count.

Tokens are processed in chunks. For each chunk every tp rank computes its slice of the logits, and one gather of three
numbers per token (largest logit, sum of exponentials, the label's logit) gives all ranks the same softmax denominator.
The gradients of x and of the weight are computed in the same pass. Logits therefore exist for one chunk only and are
computed once; running the head again in backward would cost one more matrix product. x has passed `gather_tokens`: its
gradient here is this vocabulary slice's part of a sum, which the adjoint of `gather_tokens` completes.

Losses of whole answers need the log probability of each label (`log_probabilities`), and their gradients of these are
known in backward only: there the logits of each chunk are computed again.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.first_order import first_order_only
from isograd.comm.group import Group
from isograd.core.contract import Shard, contract_of
from isograd.core.input_checks import IdCheck, invalid_ids
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import ContractError
from isograd.nn.parameter import FactoryKwargs, Layer, make
from isograd.nn.split_backward import WeightGradHook, grad_anchor, weight_grad_hook, weight_grad_requested
from isograd.nn.stream import gather_tokens
from isograd.sequence.block import accumulation_dtype

IGNORE = -100
CHUNK = 1024  # tokens: large enough for the matrix products, small beside a long sequence


class Head(Layer):
    """The language-model head: maps the residual stream to the loss, or to logits."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        tied: nn.Parameter | None = None,
        ignore_index: int = IGNORE,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        """`tied`: the embedding's weight, used here too. `ignore_index`: the label of positions without a target."""
        super().__init__()
        self.mesh, self.ignore_index = mesh, ignore_index
        self.wrong = IdCheck("labels", vocab, ignore_index)
        self.shard = Shard.even("tp", 0, vocab, mesh.size("tp"))
        if tied is None:
            tied = make(mesh, (vocab, hidden), shards=(self.shard,), key=key.fold("weight"), std=std, **made)
        self.weight = tied

    def forward(self, x: Tensor, labels: Tensor, chunk: int | None = CHUNK) -> tuple[Tensor, Tensor]:
        """(mean loss, number of labels that count) for labels [T] of all tokens of this data rank.

        Labels that are neither in the vocabulary nor `ignore_index` make the loss NaN, and an Engine refuses the step.
        """
        self.wrong.find(labels)
        x = gather_tokens(x, self.mesh)
        return cross_entropy(x, self.weight, labels, self.mesh, ignore_index=self.ignore_index, chunk=chunk)

    def log_probabilities(self, x: Tensor, labels: Tensor, chunk: int | None = CHUNK) -> Tensor:
        """Of each label [T], 0 where `ignore_index` stands; wrong labels are treated as in `forward`."""
        self.wrong.find(labels)
        x = gather_tokens(x, self.mesh)
        return log_probabilities(x, self.weight, labels, self.mesh, ignore_index=self.ignore_index, chunk=chunk)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the whole vocabulary [T, vocab], on every tp rank."""
        sizes = [stop - start for start, stop in self.shard.ranges]
        part = gather_tokens(x, self.mesh) @ self.weight.t()
        return ops.gather_for_identical_use(part, self.mesh.group("tp"), -1, sizes)


@ops.uncompiled
def cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    mesh: Mesh,
    *,
    ignore_index: int = IGNORE,
    chunk: int | None = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(mean loss, number of labels that count) of x [T, hidden], which has passed `gather_tokens`.

    The mean over no label is 0.
    `weight` holds this rank's rows of the vocabulary.
    A label that is neither in the vocabulary nor `ignore_index` makes the mean and its gradients NaN.
    Logits exist for `chunk` tokens at a time; None: for all tokens at once.
    """
    group = mesh.group("tp")
    first, vocab = _cut(weight, mesh)
    chunk = chunk or max(1, len(x))
    # Where the weight's gradient is delayed, the gradient of the logits is kept if it is the smaller one.
    hook = weight_grad_hook(x, weight) if 0 < len(x) <= min(chunk, x.shape[-1]) else None
    mean, count = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        None if hook is None else grad_anchor(weight),
        x,
        weight if hook is None else weight.detach(),
        labels,
        group,
        first,
        vocab,
        ignore_index,
        chunk,
        hook,
    )
    return mean, count


@ops.uncompiled
def cross_entropy_of_logits(
    logits: Tensor, labels: Tensor, group: Group, first: int, vocab: int, ignore_index: int = IGNORE
) -> Tensor:
    """The sum of the cross entropies of labels [T], in fp32 at least.

    logits [T, mine]: of this rank's slice of the vocabulary, from token `first`; their gradient is of this slice only.
    A label that is neither in the vocabulary nor `ignore_index` makes the sum and its gradients NaN.
    """
    total: Tensor = _CrossEntropyOfLogits.apply(  # type: ignore[no-untyped-call]
        logits, labels, group, first, vocab, ignore_index
    )
    return total


@ops.uncompiled
def log_probabilities(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    mesh: Mesh,
    *,
    ignore_index: int = IGNORE,
    chunk: int | None = CHUNK,
) -> Tensor:
    """The log probability [T] of each label, 0 of one that is `ignore_index`; in fp32 at least. See cross_entropy."""
    first, vocab = _cut(weight, mesh)
    found: Tensor = _LogProbabilities.apply(  # type: ignore[no-untyped-call]
        x, weight, labels, mesh.group("tp"), first, vocab, ignore_index, chunk or max(1, len(x))
    )
    return found


def _cut(weight: Tensor, mesh: Mesh) -> tuple[int, int]:
    """The first token of this rank's slice, and the size of the whole vocabulary."""
    contract = contract_of(weight)
    if contract is not None and contract.shards:
        return contract.local(mesh)[0][0], contract.shape[0]
    if mesh.size("tp") > 1:
        raise ContractError("IG303", where=mesh.describe_rank(), shape=tuple(weight.shape), layout=str(mesh.layout))
    return 0, len(weight)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor | None,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Group,
        first: int,
        vocab: int,
        ignore: int,
        chunk: int,
        hook: WeightGradHook | None,
    ) -> tuple[Tensor, Tensor]:
        wide = accumulation_dtype(x.dtype)
        need_x, need_weight = ctx.needs_input_grad[1:3]
        dx = torch.empty_like(x) if need_x else None
        dweight: Tensor | None = None
        dlogits: Tensor | None = None
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for start in range(0, len(x), chunk):
            part, target = x[start : start + chunk], labels[start : start + chunk]
            logits = (part @ weight.t()).to(wide)
            losses, dlogits = _of_logits(logits, target, group, first, vocab, ignore, need_x or need_weight)
            total += losses.sum(dtype=torch.float64)
            if dlogits is not None:
                dlogits = dlogits.to(x.dtype)
                if dx is not None:
                    torch.mm(dlogits, weight, out=dx[start : start + chunk])
                if need_weight:
                    dweight = _added(dweight, dlogits.t(), part, wide)
        if need_weight and dweight is None:  # no token
            dweight = torch.zeros_like(weight, dtype=wide)
        count = (labels != ignore).sum()
        ctx.hook = hook
        kept = (None, None) if hook is None else (x, dlogits)
        ctx.save_for_backward(dx, dweight, count, *kept)
        ctx.mark_non_differentiable(count)
        return (total / count.clamp(min=1)).to(wide), count

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, count, x, dlogits = ctx.saved_tensors
        scale = gradient / count.clamp(min=1)
        dtype = (dx if dx is not None else dweight).dtype
        # An Engine seeds a mean with its count. Looking costs a GPU more than a multiplication, the CPU less.
        if scale.device.type != "cpu" or scale != 1:
            dx = None if dx is None else dx * scale.to(dx.dtype)
            dweight = None if dweight is None else dweight * scale
            dlogits = None if dlogits is None else dlogits * scale.to(dlogits.dtype)
        if dlogits is not None and weight_grad_requested(ctx):
            ctx.hook(x, dlogits)
        dweight = None if dweight is None else dweight.to(dtype)
        return None, dx, dweight, None, None, None, None, None, None, None


class _CrossEntropyOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group, first: int, vocab: int, ignore: int) -> Tensor:
        wide = accumulation_dtype(logits.dtype)
        own = logits.to(wide, copy=True)
        losses, dlogits = _of_logits(own, labels, group, first, vocab, ignore, ctx.needs_input_grad[0])
        ctx.save_for_backward(None if dlogits is None else dlogits.to(logits.dtype))
        return losses.sum(dtype=torch.float64).to(wide)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits,) = ctx.saved_tensors
        return dlogits * gradient.to(dlogits.dtype), None, None, None, None, None


def _of_logits(
    logits: Tensor, labels: Tensor, group: Group, first: int, vocab: int, ignore: int, need_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The losses of tokens [T], 0 where they have no label, and the gradient of their sum.

    logits [T, mine]: of this rank's slice of the vocabulary; they are overwritten.
    """
    counts, column, here = _columns(labels, logits.shape[1], first, ignore)
    wrong = invalid_ids(labels, vocab, ignore)
    own_top, exps, (top, denominator, label_logit) = _exponentials(logits, column, here, group)
    losses = torch.where(counts, denominator.log() + top - label_logit, 0).masked_fill(wrong, torch.nan)
    if not need_gradient:
        return losses, None
    share = torch.where(counts, (own_top - top).exp(), 0).masked_fill(wrong, torch.nan)
    exps *= (share / denominator)[:, None]  # probabilities
    exps[torch.arange(len(labels), device=logits.device), column] -= here.to(exps.dtype)
    return losses, exps


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Group,
        first: int,
        vocab: int,
        ignore: int,
        chunk: int,
    ) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        found, log_sums = x.new_empty(2, len(x), dtype=wide).unbind()
        for start in range(0, len(x), chunk):
            part, target = x[start : start + chunk], labels[start : start + chunk]
            counts, column, here = _columns(target, len(weight), first, ignore)
            logits = (part @ weight.t()).to(wide)
            _, _, (top, denominator, label_logit) = _exponentials(logits, column, here, group)
            log_sum = denominator.log() + top
            log_sums[start : start + chunk] = log_sum
            wrong = invalid_ids(target, vocab, ignore)
            found[start : start + chunk] = torch.where(counts, label_logit - log_sum, 0).masked_fill(wrong, torch.nan)
        ctx.save_for_backward(x, weight, labels, log_sums)
        ctx.cut = first, ignore, chunk
        return found

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, log_sums = ctx.saved_tensors
        first, ignore, chunk = ctx.cut
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        dweight = torch.zeros_like(weight, dtype=log_sums.dtype) if need_weight else None
        for start in range(0, len(x), chunk):
            part, seed = x[start : start + chunk], gradient[start : start + chunk]
            counts, column, here = _columns(labels[start : start + chunk], len(weight), first, ignore)
            logits = (part @ weight.t()).to(log_sums.dtype)
            dlogits = logits.sub_(log_sums[start : start + chunk, None]).exp_()  # probabilities
            dlogits *= torch.where(counts, -seed, 0)[:, None]
            dlogits[torch.arange(len(part), device=x.device), column] += torch.where(here, seed, 0)
            dlogits = dlogits.to(x.dtype)
            if dx is not None:
                torch.mm(dlogits, weight, out=dx[start : start + chunk])
            if dweight is not None:
                dweight = _added(dweight, dlogits.t(), part, log_sums.dtype)
        return dx, None if dweight is None else dweight.to(weight.dtype), None, None, None, None, None, None


def _columns(labels: Tensor, mine: int, first: int, ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which labels count, the column of each in this slice (0 where it is in another), and which are in it."""
    counts, column = labels != ignore, labels - first
    here = counts & (column >= 0) & (column < mine)
    return counts, torch.where(here, column, 0), here


def _added(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """total + a @ b; where there is a total of the same dtype, the product is added as it is made."""
    if total is None:
        return (a @ b).to(wide)
    return total.addmm_(a, b) if a.dtype == wide else total.add_(a @ b)


def _exponentials(
    logits: Tensor, column: Tensor, here: Tensor, group: Group
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(this slice's largest logit, its exponentials relative to that, which overwrite the logits, and what `_combine`
    makes of all slices)."""
    own_top = logits.amax(1)
    label_logit = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0)
    exps = logits.sub_(own_top[:, None]).exp_()
    return own_top, exps, _combine(own_top, exps.sum(1), label_logit, group)


def _combine(top: Tensor, exps: Tensor, label_logit: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Combine (largest logit, sum of exponentials, label's logit) of all vocabulary slices, in rank order."""
    if group.size == 1:
        return top, exps, label_logit
    parts = raw.gather_list(torch.stack((top, exps, label_logit)), group, control=False)
    highest = torch.stack([p[0] for p in parts]).amax(0)
    denominator, logit = torch.zeros_like(exps), torch.zeros_like(label_logit)
    for part_top, part_sum, part_logit in parts:
        denominator = denominator + part_sum * (part_top - highest).exp()
        logit = logit + part_logit
    return highest, denominator, logit
