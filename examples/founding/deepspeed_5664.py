"""DeepSpeed #5664: Ulysses moved numbers to other places. Every number says here where it belongs.

    torchrun --nproc-per-node 4 examples/founding/deepspeed_5664.py
    torchrun --nproc-per-node 4 examples/founding/deepspeed_5664.py --there     # the installed deepspeed's class

q holds batch, position and head of each of its numbers, k and v the same behind offsets. The attention inside looks
that it is given the whole sequence of its heads, in order, and returns q: what comes out must be what went in. Both
orders of dimensions, three batch sizes, heads that 4 ranks divide, and heads that they do not.
"""

import argparse

import torch
import torch.distributed as dist

LENGTH, SIZE = 12, 4


def coded(batch, heads, layout):
    """[batch, sequence, heads, size], or with the sequence first: 10,000 batch + 100 position + head."""
    b, s, h = torch.meshgrid(torch.arange(batch), torch.arange(LENGTH), torch.arange(heads), indexing="ij")
    x = (10_000 * b + 100 * s + h).double().unsqueeze(-1).expand(batch, LENGTH, heads, SIZE)
    return (x if layout == "bshd" else x.transpose(0, 1)).contiguous()


def wrong(cls, batch, heads, layout):
    """The share of numbers in a wrong place, inside of attention and behind it; or the error."""
    sequence, batch_dim = (1, 0) if layout == "bshd" else (0, 1)
    x = coded(batch, heads, layout)
    seen = []

    def attention(q, k, v, *_):
        first = int(q.flatten()[0] % 100)  # my first head
        right = x.narrow(2, first, q.shape[2])
        same = q.shape == right.shape
        seen.append(float(((q != right) | (k != right + 0.25) | (v != right + 0.5)).double().mean()) if same else 1.0)
        return q

    part = x.chunk(dist.get_world_size(), sequence)[dist.get_rank()]
    layer = cls(attention, dist.group.WORLD, scatter_idx=2, gather_idx=sequence)
    try:
        out = layer(part.clone(), part + 0.25, part + 0.5, *([batch_dim] if takes_batch_dim(cls) else []))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:60]
    behind = float((out != part).double().mean()) if out.shape == part.shape else 1.0
    shares = torch.tensor([seen[0], behind])
    dist.all_reduce(shares)
    inside, behind = (shares / dist.get_world_size()).tolist()
    return "right" if not inside and not behind else f"{inside:.0%} wrong inside, {behind:.0%} behind"


def takes_batch_dim(cls):
    return "batch_dim_idx" in cls.forward.__code__.co_varnames


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--there", action="store_true", help="deepspeed's own class")
    there = parser.parse_args().there
    if there:
        import numpy
        import torch.distributed.elastic.agent.server.api as removed

        for module, name in ((removed, "_get_socket_with_port"), (numpy, "BUFSIZE")):  # 0.14 imports them
            module.__dict__.setdefault(name, None)
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention
        from deepspeed.utils import groups

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now
        deepspeed.init_distributed("gloo")
        if hasattr(deepspeed.comm, "initialize_mesh_device"):  # newer versions ask it who shares a sequence
            shape = (1, dist.get_world_size())
            groups.mesh_device = deepspeed.comm.initialize_mesh_device(shape, ("data_parallel", "sequence_parallel"))
        whose = f"deepspeed {deepspeed.__version__}"
    else:
        from isograd.integrations.deepspeed import DistributedAttention, init_distributed

        init_distributed()
        whose = "isograd"
    found = {}
    for layout in ("bshd", "sbhd"):
        for batch in (1, 2, 3):
            for heads in (8, 6):
                found[layout, batch, heads] = wrong(DistributedAttention, batch, heads, layout)
    if dist.get_rank() == 0:
        print(f"{whose}, {dist.get_world_size()} ranks")
        for (layout, batch, heads), what in found.items():
            print(f"  {layout}  batch {batch}  {heads} heads: {what}")
    dist.barrier()
    (deepspeed.comm if there else dist).destroy_process_group()  # only theirs ends the threads of groups that they keep
    return 0 if there or all(what == "right" for what in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
