"""GradCache (chunked contrastive training) over DDP, as its page shows it: one encoder, two sides, gathered rows."""

import sys

import gradcache
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.modules["grad_cache"] = gradcache  # the package imports itself under its older name
from gradcache.grad_cache import GradCache  # noqa: E402
from gradcache.loss import DistributedContrastiveLoss  # noqa: E402

SWITCHES = ("scaled",)
ROWS = 8


def plain(args):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def batch(rank, world, micro, args):
    generator = torch.Generator().manual_seed(micro * world + rank)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 8, generator=generator)


def whole(model, batches, args):
    queries, passages = (torch.cat(side) for side in zip(*batches, strict=True))
    logits = model(queries) @ model(passages).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(plain(args))
    loss_of = DistributedContrastiveLoss()
    scale = world if args.scaled else 1
    cache = GradCache([model, model], [2, 2], lambda x, y: loss_of(x, y) * scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        optimizer.zero_grad()
        cache(*batch(rank, world, step, args), no_sync_except_last=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
