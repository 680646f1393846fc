"""adapter-unreduced: adapters are put into a model that DDP already wraps, and DDP never hears of their gradients.

DDP hooks the parameters that a model has when it is wrapped. What comes later (LoRA, a new head) computes, gets
gradients and is stepped, each rank's by its own data alone: copies drift apart, and one rank's are saved.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isograd_verify.corpus.plain import HIDDEN, Mlp, batch, cross_entropy, my_rows, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp|ranks", r"lora_"


class Adapted(nn.Module):
    """A linear layer whose weight stands still, and a product of two small ones that learns."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 3, bias=False, dtype=base.weight.dtype)
        self.lora_b = nn.Linear(3, HIDDEN, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., HIDDEN]."""
        return self.base(x) + self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


def train(bug: bool, seed: int) -> None:
    """Two steps of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    model.embed.requires_grad_(False)
    model.down.requires_grad_(False)
    if not bug:
        model.down = Adapted(model.down, seed)
    wrapped = DistributedDataParallel(model)
    if bug:
        model.down = Adapted(model.down, seed)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        tokens, labels = (my_rows(part, rank, world) for part in batch(seed + step))
        count = valid(labels)
        dist.all_reduce(count)
        (cross_entropy(wrapped(tokens), labels) * world / count).backward()  # DDP divides by world
        optimizer.step()
        optimizer.zero_grad()
