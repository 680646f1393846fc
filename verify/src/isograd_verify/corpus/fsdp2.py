"""Bugs around FSDP2 (fully_shard): parameters and gradients are DTensors cut by rows, 23 rows over two ranks included.

FSDP2 averages gradients over ranks, as DDP does, and reduces them after every backward unless it is told not to.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from isograd_verify.corpus.plain import HIDDEN, VOCAB, Mlp, cross_entropy, my_micro_batches, seeded, steps

WORLD, LAYOUT = 2, "dp2"
MICRO_BATCHES = 3
MAX_NORM = 0.2

BUGS = {
    "mean-of-means": ("ranks", ".*"),
    "nosync-missing": ("dp|ranks", ".*"),
    "accum-overwritten": ("micro-batches", ".*"),
    "accum-undivided": ("micro-batches", ".*"),
    "clip-per-rank": ("dp|ranks", ".*"),
    "bf16-reduction": ("dp|ranks", ".*"),
}


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def share(logits: Tensor, labels: Tensor, count: Tensor, bug: str) -> Tensor:
    """What this rank's part of a micro-batch adds to the mean over the step's labels."""
    if bug == "mean-of-means":
        return cross_entropy(logits, labels, "mean") / MICRO_BATCHES / dist.get_world_size()
    loss = cross_entropy(logits, labels) / count
    if bug == "accum-undivided":
        loss = loss * MICRO_BATCHES  # for an engine that divides by it, and no longer does
    return loss


def clip(model: nn.Module, bug: str) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if bug == "clip-per-rank":
        gradients = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)


def train(bug: str, seed: int) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))  # the whole world: no new process group
    policy = MixedPrecisionPolicy()
    if bug == "bf16-reduction":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = seeded(Model, seed)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    if bug == "nosync-missing":
        model.set_requires_gradient_sync(False)  # for accumulation; never set back
    for step in steps(model):
        for tokens, labels, count in my_micro_batches(seed + step, MICRO_BATCHES):
            if bug == "accum-overwritten":
                model.zero_grad()
            (share(model(tokens), labels, count, bug) * world).backward()  # FSDP will divide by world
        clip(model, bug)
