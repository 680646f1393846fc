"""What the corpus' programs share: tiny data, tiny models, one of them cut over ranks, and the moves of tensor
parallelism, in plain torch.

Every program runs on any number of ranks and is the one-device program when there is one rank. All is fp64, uneven on
purpose: sequences have different numbers of labels, so ranks and micro-batches have, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, BATCH, LENGTH = 23, 8, 8, 6


def program(layout: str, axis: str = "", tensors: str = ".*", world: int = 2, **more: Any) -> Callable[[Any], Any]:
    """A function `train` of a file with several programs as what a file with one has: see __init__.py."""
    about = {"WORLD": world, "LAYOUT": layout, "AXIS": axis, "TENSORS": tensors, **more}
    return lambda train: SimpleNamespace(train=train, __doc__=train.__doc__, **about)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of the whole step, [BATCH, LENGTH]; row r has labels only from position r % LENGTH on."""
    generator = torch.Generator().manual_seed(1000 + seed)
    window = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    labels = window[:, 1:].clone()
    for row in range(BATCH):
        labels[row, : (row + seed) % LENGTH] = -100
    return window[:, :-1], labels


def my_rows(whole: Tensor, index: int, of: int) -> Tensor:
    return whole.tensor_split(of)[index]


def my_part(whole: Tensor) -> Tensor:
    """This rank's rows, where every rank is a data rank."""
    return my_rows(whole, dist.get_rank(), dist.get_world_size())


def micro_batches(index: int, of: int, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(*(my_rows(part, index, of).tensor_split(count) for part in batch(seed)), strict=True)


def valid(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


class Mlp(nn.Module):
    """Embedding, a block with a norm, and a head: enough for most bugs of data parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 12)
        self.down = nn.Linear(12, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def body(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


def seeded(module: type[nn.Module], seed: int, *args: Any) -> Any:
    """The same weights on every rank, made from a seed; of a model that is cut over ranks this rank's part."""
    torch.manual_seed(seed)
    model: Any = module(*args).double()
    if hasattr(model, "shard"):
        model.shard()
    return model


def steps(model: nn.Module, lr: float = 0.1, weight_decay: float = 0.0, optimizer: Any = None) -> Iterator[int]:
    """Two steps of SGD: each is taken when the loop that made its gradients comes round."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)
    for step in range(2):
        yield step
        optimizer.step()
        optimizer.zero_grad()


def backwards(model: nn.Module, seed: int, lr: float = 0.1) -> Iterator[int]:
    """`steps` in which each rank computes the loss of the whole batch: backward is done."""
    for step in steps(model, lr):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
        yield step


def over_sequences(model: nn.Module, seed: int) -> Iterator[int]:
    """`steps` on this rank's part of each sequence: backward is done."""
    for step in steps(model):
        whole = batch(seed + step)
        tokens, labels = (mine(part, 1) for part in whole)
        (cross_entropy(model(tokens), labels) / valid(whole[1])).backward()
        yield step


def my_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(this rank's rows, their labels, how many labels the whole batch has)."""
    whole = batch(seed)
    tokens, labels = map(my_part, whole)
    return tokens, labels, valid(whole[1])


def my_micro_batches(seed: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This rank's micro-batches: (tokens, labels, how many labels the whole batch has)."""
    parts = micro_batches(dist.get_rank(), dist.get_world_size(), seed, count)
    return ((tokens, labels, valid(batch(seed)[1])) for tokens, labels in parts)


def my_batches(model: nn.Module, seed: int, **options: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`my_batch` of each of `steps`, which take the options."""
    return (my_batch(seed + step) for step in steps(model, **options))


def all_reduce_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def total(x: Tensor, group: Any = None) -> Tensor:
    found = x.contiguous().clone()
    dist.all_reduce(found, group=group)
    return found


def mine(x: Tensor, dim: int, group: Any = None) -> Tensor:
    """This rank's part of what all ranks of a group hold."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


def gather(x: Tensor, dim: int, group: Any = None) -> Tensor:
    """The parts of all ranks, without a backward."""
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim)


def move(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of a tensor with a backward of its own; both get the arguments that stand behind the tensor."""

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
            ctx.args = args
            return forward(x, *args)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return backward(gradient, *ctx.args), *(None for _ in ctx.args)

    apply: Callable[..., Tensor] = Move.apply
    return apply


def my_sum(x: Tensor, dim: int, group: Any = None) -> Tensor:
    """This rank's part of the sum over a group."""
    return mine(total(x, group), dim, group)


copied = move(lambda x, group=None: x, total)  # in front of column-parallel layers
summed = move(total, lambda gradient, group=None: gradient)  # behind row-parallel layers
gathered = move(gather, my_sum)  # in front of column layers under sequence parallelism, and of experts: rows of all
scattered = move(my_sum, gather)  # behind row layers under sequence parallelism, and experts
joined = move(gather, mine)  # what follows is computed alike on all ranks


def cut(whole: nn.Linear, dim: int, group: Any = None) -> nn.Linear:
    """This rank's part of a linear layer: of its outputs (dim 0, with bias) or of its inputs (dim 1, without)."""
    weight = mine(whole.weight.detach(), dim, group)
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=dim == 0 and whole.bias is not None, dtype=weight.dtype)
    part.weight = nn.Parameter(weight)
    if part.bias is not None:
        part.bias = nn.Parameter(mine(whole.bias.detach(), 0, group))
    return part


INNER = 12


class ShardedMlp(Mlp):
    """`up` and `down` are cut over the ranks; all else is replicated and sees the same activations everywhere."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.down, self.group = nn.Linear(INNER, HIDDEN, bias=False), group

    def shard(self) -> None:
        self.up, self.down = cut(self.up, 0, self.group), cut(self.down, 1, self.group)

    def block(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(copied(self.norm(x), self.group)))  # [batch, sequence, inner / tp]
        return x + summed(self.down(inner), self.group)


class GatheredMlp(nn.Module):
    """`up` is cut over its outputs, which are gathered at once; `norm` and `head` are computed alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.head = nn.Linear(INNER, VOCAB)
        self.gather: Callable[[Tensor, int], Tensor] = joined

    def shard(self) -> None:
        self.up = cut(self.up, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.gather(F.gelu(self.up(copied(self.embed(tokens)))), -1)  # [batch, sequence, inner]
        return self.head(self.norm(inner))
