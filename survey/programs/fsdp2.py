"""FSDP2 (fully_shard) as torch's tutorial shows it: each block, then the whole model."""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SWITCHES = ("deferred", "mixed", "reduce-bf16", "clip")  # deferred: reduce with the last micro-batch only


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny.model()
    policy = MixedPrecisionPolicy()
    if args.mixed or args.reduce_bf16:
        reduced = torch.bfloat16 if args.reduce_bf16 else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        for i in range(args.accumulate):
            if args.deferred:
                model.set_requires_gradient_sync(i == args.accumulate - 1)
            tokens, labels = batch(rank, world, step * args.accumulate + i, args)
            (tiny.loss(model(tokens).float(), labels) / args.accumulate).backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
