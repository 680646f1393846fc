"""copies-begin-apart: a value head is made beside a wrapped model, on each rank from a random state of its own.

DDP broadcasts what it wraps, so the body is one model. The head is not in it: each rank trains a head of its own, by
its own data, and rank 0's is saved. Nothing is averaged that should not be, every rank's gradient is its own loss's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isograd_verify.corpus.plain import HIDDEN, Mlp, batch, cross_entropy, my_rows, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp|ranks", r"^Linear\."
ALONE = True  # no run on one device has the heads of two


class Body(Mlp):
    """A model that gives what its head was given as well."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(logits, hidden states)."""
        x = self.body(tokens)
        return self.head(x), x


def train(bug: bool, seed: int) -> None:
    """Two steps of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    body = DistributedDataParallel(seeded(Body, seed))
    torch.manual_seed(seed + (100 * rank if bug else 0))
    value: nn.Module = nn.Linear(HIDDEN, 1).double()
    if not bug:
        value = DistributedDataParallel(value)
    optimizer = torch.optim.SGD([*body.parameters(), *value.parameters()], lr=0.1)
    for step in range(2):
        tokens, labels = (my_rows(part, rank, world) for part in batch(seed + step))
        count = valid(labels)
        dist.all_reduce(count)
        logits, x = body(tokens)
        right = (logits.argmax(-1) == labels).double()
        mine = (value(x.detach())[..., 0] - right).square() * (labels != -100)
        loss = cross_entropy(logits, labels) + mine.sum()
        (loss * world / count).backward()  # DDP divides by world
        optimizer.step()
        optimizer.zero_grad()
