"""torch's tensor parallel styles as its tutorial shows them: attention and MLP, sequence parallel,
loss parallel, and with FSDP2 over pairs of ranks."""

from contextlib import nullcontext

import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

SWITCHES = ("sequence", "loss-parallel", "odd-vocab", "fsdp")


def READERS(world):
    """Two ranks share their data; four are two pairs, with data of their own under FSDP2."""
    return range(0, world, 2)


def batch(rank, world, micro, args):
    return tiny.text(micro * max(world // 2, 1) + rank // 2, args.uneven, vocab=vocab(args))


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def vocab(args):
    return 61 if args.odd_vocab else tiny.VOCAB


def plain(args):
    return tiny.model(vocab=vocab(args))


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pair = min(2, world)
    whole_mesh = init_device_mesh("cpu", (world // pair, pair), mesh_dim_names=("data", "tensor"))
    mesh = whole_mesh["tensor"]
    model = plain(args)
    attention = {f"attention.{n}": ColwiseParallel() for n in "qkv"}
    block = {**attention, "attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    whole = {"head": ColwiseParallel(output_layouts=Shard(-1) if args.loss_parallel else Replicate(),
                                     use_local_output=not args.loss_parallel)}  # fmt: skip
    if args.sequence:
        block["attention"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        block["up"] = ColwiseParallel(input_layouts=Shard(1))
        block["attention.o"] = block["down"] = RowwiseParallel(output_layouts=Shard(1))
        block["norm1"] = block["norm2"] = whole["norm"] = SequenceParallel()
        whole["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        whole["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=whole["head"].output_layouts[0],
                                        use_local_output=not args.loss_parallel)  # fmt: skip
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, whole)
    if args.fsdp:
        for layer in model.layers.values():
            fully_shard(layer, mesh=whole_mesh["data"])
        fully_shard(model, mesh=whole_mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(args.steps):
        for i in range(args.accumulate):
            tokens, labels = batch(rank, world, step * args.accumulate + i, args)
            with loss_parallel() if args.loss_parallel else nullcontext():
                (tiny.loss(model(tokens), labels) / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
