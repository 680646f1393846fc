"""FSDP2 (fully_shard) as torch's tutorial shows it: each block, then the whole model."""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SWITCHES = ("deferred", "mixed", "reduce-bf16", "clip", "hybrid")  # deferred: reduce with the last micro-batch only


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
        computed, reduced = torch.bfloat16, torch.float32
        if args.reduce_bf16:
            computed, reduced = reduced, computed
        policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced)
    mesh = None
    if args.hybrid:  # copies of shards
        copies = min(2, world)
        mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("copies", "shards"))
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy, mesh=mesh)
    fully_shard(model, mp_policy=policy, mesh=mesh)
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
