"""torch.distributed.nn.functional.all_gather on gloo: its backward reads a gradient in the order of its memory.

    torchrun --nproc-per-node 2 torch_all_gather_strides.py

pytorch #192920. What comes back to each gathered part is transposed, and so not contiguous. The gradient of x is the
sum over both ranks, 2 w^T; the printed one has the right numbers in other places.
"""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
x, w = torch.randn(3, 4, requires_grad=True), torch.arange(12.0).view(4, 3)
sum((part.T * w).sum() for part in all_gather(x)).backward()
print(f"rank {dist.get_rank()}: wrong by up to {float((x.grad - 2 * w.T).abs().max()):g}; expected 0")
dist.destroy_process_group()
