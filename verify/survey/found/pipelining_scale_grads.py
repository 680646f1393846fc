"""torch.distributed.pipelining: with gradient accumulation over schedule steps, scale_grads divides earlier ones again.

    torchrun --nproc-per-node 2 pipelining_scale_grads.py

Two stages, four micro-batches, the same batch in two calls of schedule.step() before one optimizer step. Both calls
add the same gradient g, so 2 g is expected. scale_grads divides .grad, the sum so far, by the number of micro-batches
at the end of every call. After the second it is g / 4 + g = 1.25 g.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
layer = nn.Linear(4, 4)
x, y = torch.randn(8, 4), torch.zeros(8, 4)
found = []
for calls in (1, 2):
    stage = PipelineStage(layer, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    layer.zero_grad()
    for _ in range(calls):
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == world - 1 else {}))
    found.append(layer.weight.grad.clone())
print(f"rank {rank}: two calls give {float((found[1] / found[0]).mean()):.2f} times the gradient of one; expected 2")
dist.destroy_process_group()
