"""A training loop with FSDP2 (fully_shard), as its tutorial writes it.

    torchrun --nproc-per-node 2 examples/unmodified/fsdp2_loop.py [--global-mean]

Without --global-mean every rank divides by its own number of labels, and FSDP2 averages those means over ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH = 101, 24


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(rank, count, rows):
    """Random text; each row has labels only behind a prompt of random length."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        text = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
        prompt = torch.randint(LENGTH, (rows, 1), generator=generator)
        labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, -100)
        yield text[:, :-1], labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-mean", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Model(hidden=32, layers=2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, (tokens, labels) in enumerate(batches(rank, args.steps, rows=4)):
        logits = model(tokens).flatten(0, 1)
        if args.global_mean:
            count = (labels != -100).sum()
            dist.all_reduce(count)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") * world / count
        else:
            loss = F.cross_entropy(logits, labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
