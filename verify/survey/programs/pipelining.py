"""torch.distributed.pipelining as its tutorial shows it: two stages cut by hand, four micro-batches."""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SWITCHES = ("gpipe", "interleaved", "unscaled")
MICRO = 4


def READERS(world):
    return [0]


def batch(rank, world, step, args):
    return tiny.text(step, args.uneven, rows=2 * MICRO)


def parts(batch):
    """A step's micro-batches."""
    return list(zip(*(t.chunk(MICRO) for t in batch), strict=True))


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def plain(args):
    return tiny.model(layers=4)


def cut(model, part, parts):
    """Only the blocks of one stage."""
    own = 4 // parts
    for name in list(model.layers):
        if int(name) // own != part:
            del model.layers[name]
    if part:
        model.embed = None
    if part != parts - 1:
        model.norm = model.head = None
    return model


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = range(rank, 2 * world, world) if args.interleaved else [rank]
    parts = len(own) * world
    stages = [PipelineStage(cut(plain(args), p, parts), p, parts, torch.device("cpu")) for p in own]
    kind = ScheduleInterleaved1F1B if args.interleaved else ScheduleGPipe if args.gpipe else Schedule1F1B
    schedule = kind(stages if args.interleaved else stages[0], MICRO, loss_fn=tiny.loss, scale_grads=not args.unscaled)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for step in range(args.steps):
        for i in range(args.accumulate):
            tokens, labels = batch(0, 1, step * args.accumulate + i, args)
            schedule.step(*([tokens] if rank == 0 else []), **({"target": labels} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
