"""FullyShardedDataParallel (FSDP1) with original parameters, as torch's documentation shows it."""

import functools

import tiny
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

SWITCHES = ("flat", "no-shard")


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def gradients(models):
    """Each parameter's own elements of a flat one: ranks hold rows of them one behind the other."""
    found = {}
    for root in models:
        for prefix, module in root.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            flat = module._handle.flat_param
            for i, (name, info) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
                gradient = flat._params[i].grad if flat._params is not None else flat.grad
                if info.in_shard and gradient is not None:
                    first = 0 if flat._params is not None else info.offset_in_shard
                    found[f"{prefix}.{name}".lstrip(".")] = gradient.flatten()[first : first + info.numel_in_shard]
    return found


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = FullyShardedDataParallel(
        tiny.model(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={tiny.Block}),
        use_orig_params=not args.flat, device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD if args.no_shard else ShardingStrategy.FULL_SHARD,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        for i in range(args.accumulate):
            tokens, labels = batch(rank, world, step * args.accumulate + i, args)
            (tiny.loss(model(tokens), labels) / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
