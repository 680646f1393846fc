"""A plain DDP training loop with gradient accumulation, as found in many repositories.

    torchrun --nproc-per-node 2 examples/unmodified/ddp_loop.py

Sequences have different numbers of labels, and F.cross_entropy takes the mean of each micro-batch on each rank.
With --global-mean the labels of the whole step are counted first, and every label weighs the same.
"""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH = 101, 32


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x, mask):
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
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
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(args.hidden, args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = batches(rank, args.steps * args.accumulate, args.rows)
    began = time.perf_counter()
    for step in range(args.steps):
        micro_batches = [next(data) for _ in range(args.accumulate)]
        count = sum((labels != -100).sum() for _, labels in micro_batches)
        if args.global_mean:
            dist.all_reduce(count)
        for i, (tokens, labels) in enumerate(micro_batches):
            last = i == args.accumulate - 1
            with nullcontext() if last else model.no_sync():
                logits = model(tokens).flatten(0, 1)
                if args.global_mean:
                    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") * world / count
                else:
                    loss = F.cross_entropy(logits, labels.flatten()) / args.accumulate
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} {time.perf_counter() - began:.3f} s", flush=True)
            began = time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
