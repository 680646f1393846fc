"""Optimizers of other libraries over DDP: schedule-free AdamW, torchao's 8-bit AdamW, LocalSGD of torch itself."""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

SWITCHES = ("schedulefree", "torchao", "local-sgd", "muon")


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def optimizer_of(model, args):
    if args.schedulefree:
        import schedulefree

        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)
        optimizer.train()
        return optimizer
    if args.torchao:
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), lr=1e-3)
    if args.muon:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2]
        return torch.optim.Muon(matrices, lr=1e-3)
    if args.local_sgd:
        alone, _ = dist.new_subgroups(group_size=1)
        model.register_comm_hook(local.PostLocalSGDState(None, alone, start_localSGD_iter=2), local.post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=2)
        return PostLocalSGDOptimizer(optim=torch.optim.SGD(model.parameters(), lr=0.1), averager=averager)
    raise SystemExit("which optimizer?")


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(tiny.model())
    optimizer = optimizer_of(model, args)
    for step in range(args.steps):
        for i in range(args.accumulate):
            tokens, labels = batch(rank, world, step * args.accumulate + i, args)
            (tiny.loss(model(tokens), labels) / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
