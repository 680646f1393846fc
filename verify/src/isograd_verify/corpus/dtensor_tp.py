"""Bugs around tensor parallelism by DTensor: parallelize_module with sequence parallelism, and a few layers by hand.

Parameters that work on a part of the sequence, or on this rank's heads, are replicated DTensors: their gradients come
out of backward as pending sums (Partial), which `train` makes whole. Head and loss see the whole sequence everywhere.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from isograd_verify.corpus.plain import HIDDEN, VOCAB, backwards, seeded

WORLD, LAYOUT = 2, "tp2 sp"
HEADS = 2
MAX_NORM = 0.2

BUGS = {
    "norm-unreduced": ("tp", r"^norm_(attention|mlp)\."),
    "qknorm-unreduced": ("tp", r"[qk]_norm\."),
    "bias-n-times": ("tp", r"^down\.bias$"),
    "gather-backward-sum": ("tp", r"^(?!head\.)"),
    "clip-per-rank": ("tp", ".*"),
    "norm-counts-replicas": ("tp", ""),
}


class Attention(nn.Module):
    """Of the heads that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(HIDDEN // HEADS), nn.RMSNorm(HIDDEN // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HIDDEN // HEADS)) for part in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)  # over [batch, sequence, heads, features]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Down(nn.Linear):
    """A row-parallel linear; by hand, as quantised ones are, under the bug."""

    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            assert isinstance(x, DTensor) and isinstance(self.weight, DTensor) and isinstance(self.bias, DTensor)
            bias = self.bias.to_local(grad_placements=[Partial()])
            partial = F.linear(x.to_local(), self.weight.to_local(), bias)
            return DTensor.from_local(partial, x.device_mesh, [Partial()])
        return super().forward(x)


class Model(nn.Module):
    sums_copies = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm_attention, self.norm_mlp, self.norm = (nn.LayerNorm(HIDDEN) for _ in range(3))
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 12), Down(12, HIDDEN)
        nn.init.zeros_(self.down.bias)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [batch, sequence / tp, hidden]
        x = x + self.attention(self.norm_attention(x))
        x = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        whole = self.norm(x).redistribute(placements=[Replicate()])
        return self.head(whole.to_local(grad_placements=[Partial() if self.sums_copies else Replicate()]))


def parallel(model: Model, mesh: DeviceMesh, bug: str) -> None:
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm_attention": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.[qkv]": ColwiseParallel(),
        "attention.[qk]_norm": SequenceParallel(sequence_dim=2, use_local_output=True),  # cut by heads
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm_mlp": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    if bug == "norm-unreduced":
        del plan["norm_attention"], plan["norm_mlp"]
    if bug == "qknorm-unreduced":
        del plan["attention.[qk]_norm"]
    model.down.by_hand = bug == "bias-n-times"
    model.sums_copies = bug == "gather-backward-sum"
    parallelize_module(model, mesh, plan)


def clip(model: nn.Module, bug: str) -> None:
    """By the norm with every element once: shards where they are, copies on the first rank."""
    copies_too = dist.get_rank() == 0 or bug == "norm-counts-replicas"
    counted: list[Tensor] = []
    for gradient in [p.grad for p in model.parameters() if p.grad is not None]:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if copies_too or (isinstance(gradient, DTensor) and gradient.placements[0].is_shard()):
            counted.append(local)
    squares = nn.utils.get_total_norm(counted).square()
    if bug != "clip-per-rank":
        dist.all_reduce(squares)
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, squares.sqrt(), foreach=False)


def train(bug: str, seed: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # the whole world: no new process group
    model = seeded(Model, seed)
    parallel(model, mesh, bug)
    for _ in backwards(model, seed):
        for parameter in model.parameters():  # sums over ranks that are pending are made, and whole gradients are cut
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        clip(model, bug)
