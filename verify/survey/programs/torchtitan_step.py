"""torchtitan's arithmetic on gloo: its meshes, FSDP2 that does not divide, its summed loss over the labels of the whole
step, its clipping. Its own models attend with FlexAttention, which has no backward on a CPU; the model is tiny.py's."""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division  # noqa: E402

SWITCHES = ("divide",)  # as if that one call were forgotten


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims.from_config(ParallelismConfig(spmd_backend="partial_dtensor"), world)
    mesh = dims.get_mesh("fsdp")
    dist_utils.set_spmd_backend("partial_dtensor")
    model = tiny.model()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not args.divide:
        disable_fsdp_gradient_division(model)
        for layer in (*model.layers.values(), model):
            layer.set_force_sum_reduction_for_comms(True)  # gloo has no sums of multiples
    loss_of = CrossEntropyLoss.Config(global_vocab_size=tiny.VOCAB).build(compile_config=CompileConfig(enable=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        micros = [batch(rank, world, step * args.accumulate + i, args) for i in range(args.accumulate)]
        labels = sum((t != -100).sum() for _, t in micros)
        if dims.dp_enabled:
            labels = dist_utils.dist_sum_tensor(labels, dims.get_mesh("batch"))
        for ids, targets in micros:
            loss, _ = loss_of(model(ids), targets, labels)
            loss.backward()
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
