"""pytorch-metric-learning's DistributedLossWrapper over DDP, as its documentation shows it."""

import tiny
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import distributed as spread
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SWITCHES = ("triplet", "efficient", "alone")


def plain(args):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def batch(rank, world, micro, args):
    generator = torch.Generator().manual_seed(micro * world + rank)
    return torch.randn(12, 8, generator=generator), torch.randint(3, (12,), generator=generator)


def loss_of(args):
    return losses.TripletMarginLoss() if args.triplet else losses.NTXentLoss()


def whole(model, batches, args):
    """One loss over the rows of all ranks."""
    return loss_of(args)(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]))


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(plain(args))
    loss = loss_of(args)
    if not args.alone:
        loss = spread.DistributedLossWrapper(loss, efficient=args.efficient)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        x, y = batch(rank, world, step, args)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
