"""fairscale's ShardedDataParallel with its OSS optimizer, and its FullyShardedDataParallel."""

import tiny
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
from fairscale.optim.oss import OSS

SWITCHES = ("full",)


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny.model()
    if args.full:
        model = FullyShardedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        optimizer = OSS(params=model.parameters(), optim=torch.optim.Adam, lr=1e-3)
        model = ShardedDataParallel(model, optimizer)
    for step in range(args.steps):
        for i in range(args.accumulate):
            tokens, labels = batch(rank, world, step * args.accumulate + i, args)
            (tiny.loss(model(tokens), labels) / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
