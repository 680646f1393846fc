"""ZeroRedundancyOptimizer and LBFGS over DDP, as their documentation shows them."""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

SWITCHES = ("lbfgs", "in-buckets")


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(tiny.model())
    if args.lbfgs:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, parameters_as_bucket_view=args.in_buckets
        )
    for step in range(args.steps):
        tokens, labels = batch(rank, world, step, args)

        def closure(tokens=tokens, labels=labels):
            optimizer.zero_grad()
            loss = tiny.loss(model(tokens), labels)
            loss.backward()
            return loss

        if args.lbfgs:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
