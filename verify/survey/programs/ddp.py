"""DistributedDataParallel as its documentation shows it, with the ways to accumulate, hook, and join."""

from contextlib import nullcontext

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

SWITCHES = ("global-mean", "no-sync", "find-unused", "static-graph", "bucket-view", "fp16-hook", "powersgd", "join")


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny.model()
    if args.find_unused:
        model.spare = nn.Linear(4, 4)
    model = DistributedDataParallel(
        model, find_unused_parameters=args.find_unused, static_graph=args.static_graph,
        gradient_as_bucket_view=args.bucket_view,
    )  # fmt: skip
    if args.fp16_hook:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if args.powersgd:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=0, use_error_feedback=False,
            warm_start=False,
        )  # fmt: skip
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = args.steps - (args.join and rank == 1)  # with join a rank may have fewer batches
    with model.join() if args.join else nullcontext():
        for step in range(own):
            micros = [batch(rank, world, step * args.accumulate + i, args) for i in range(args.accumulate)]
            count = sum((labels != -100).sum() for _, labels in micros)
            if args.global_mean:
                dist.all_reduce(count)
            for i, (tokens, labels) in enumerate(micros):
                with model.no_sync() if args.no_sync and i < args.accumulate - 1 else nullcontext():
                    if args.global_mean:
                        loss = tiny.loss(model(tokens), labels) * (labels != -100).sum() * world / count
                    else:
                        loss = tiny.loss(model(tokens), labels) / args.accumulate
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
