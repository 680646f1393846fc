"""DeepSpeed's engine as its getting-started page shows it: initialize, backward, step; ZeRO stages 0 to 3."""

import deepspeed
import tiny
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

SWITCHES = ("zero1", "zero2", "zero3")


BEFORE = (deepspeed.DeepSpeedEngine, "step", lambda engine: engine.is_gradient_accumulation_boundary())


def batch(rank, world, micro, args):
    return tiny.text(micro * world + rank, args.uneven)


def truth(model, batch):
    return tiny.summed(model(batch[0]), batch[1])


def gradients(models):
    return {n: safe_get_full_grad(p) for model in models for n, p in model.named_parameters()}


def main():
    args = tiny.options(*SWITCHES)
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny.model()
    config = {
        "train_micro_batch_size_per_gpu": tiny.ROWS,
        "gradient_accumulation_steps": args.accumulate,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3 if args.zero3 else 2 if args.zero2 else 1 if args.zero1 else 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(args.steps):
        for i in range(args.accumulate):
            tokens, labels = batch(rank, world, step * args.accumulate + i, args)
            engine.backward(tiny.loss(engine(tokens), labels))
            engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
