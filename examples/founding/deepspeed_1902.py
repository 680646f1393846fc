"""DeepSpeed #1902: no_sync at ZeRO 2 and 3, GradCache on it, and a language model's loss under a loss scale.

    torchrun --nproc-per-node 4 examples/founding/deepspeed_1902.py

Three steps at each stage, each compared by name with one device in fp64:

    accumulated    three micro-batches of different numbers of labels, two of them inside `model.no_sync()`
    cached         GradCache: texts encoded in chunks, negatives from all ranks, the reductions of one backward
    mixed          a language model's loss and a contrastive one over the same encoder, under a loss scale of 2**10:
                   what is cached is scaled once, like the rest
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import isograd as ig
from isograd.integrations import deepspeed
from isograd.losses.contrastive import AuxiliaryLoss, FullBatchLoss

VOCAB, HIDDEN, TEXTS, LENGTH = 32, 16, 4, 6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(VOCAB, HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, VOCAB),
        )

    def forward(self, tokens, logits=False):
        x = torch.tanh(self.mix(self.embed(tokens)))
        return self.head(x) if logits else F.normalize(x.mean(1), dim=-1)


def encoder():
    torch.manual_seed(0)
    return Encoder().double()


def texts(rank, number):
    return torch.randint(VOCAB, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(100 * rank + number))


def language(model, rank, number):
    """The mean over this micro-batch's labels, and their number."""
    tokens = texts(rank, number)
    labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH - 1) < (rank + number) % 4, -100)
    loss = F.cross_entropy(model(tokens[:, :-1], logits=True).flatten(0, 1), labels.flatten(), ignore_index=-100)
    return loss, int((labels != -100).sum())


def contrast(queries, answers):
    """Each query's own answer among all."""
    return F.cross_entropy(20 * queries @ answers.T, torch.arange(len(queries)))


# -- one device


def alone_accumulated(ranks):
    model, weight = encoder(), 0
    for rank in range(ranks):
        for number in range(3):
            loss, count = language(model, rank, number)
            (loss * count).backward()
            weight += count
    return {name: p.grad / weight for name, p in model.named_parameters() if p.grad is not None}


def contrastive_alone(model, ranks):
    return contrast(*(model(torch.cat([texts(rank, side) for rank in range(ranks)])) for side in (7, 8)))


def alone_cached(ranks):
    model = encoder()
    contrastive_alone(model, ranks).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def alone_mixed(ranks):
    model = encoder()
    losses = [language(model, rank, 0) for rank in range(ranks)]
    total = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    (total + 0.5 * contrastive_alone(model, ranks)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


# -- on isograd's engine


def accumulated(engine, rank):
    for number in range(3):
        loss, count = language(engine, rank, number)
        if number < 2:
            with engine.no_sync():
                engine.backward(loss, weight=count)
        else:
            engine.backward(loss, weight=count)


def in_chunks(engine, rank):
    loss = FullBatchLoss(engine.mesh, contrast)
    ig.contrastive.GradientCache(engine.engine, loss, chunk=3).backward(texts(rank, 7), texts(rank, 8))


STEPS = {"accumulated": (accumulated, alone_accumulated), "cached": (in_chunks, alone_cached)}


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def mixed(stage, rank):
    """Two terms, each with a weight of its own; the texts of the contrastive one are encoded in chunks."""
    mesh = ig.Mesh(f"dp{dist.get_world_size()} zero{stage}")
    model = encoder()
    engine = ig.Engine(model, mesh, torch.optim.AdamW, loss_scale=ig.LossScale(2.0**10))
    _, count = language(model, rank, 0)
    half = FullBatchLoss(mesh, lambda queries, answers: 0.5 * contrast(queries, answers))
    second = AuxiliaryLoss([(lambda: language(model, rank, 0)[0], count)])
    ig.contrastive.GradientCache(engine, half, chunk=3).backward(texts(rank, 7), texts(rank, 8), second=second)
    return dict(engine.grads().items())


def error(found, truth):
    return max(float((found[name] - gradient).norm() / gradient.norm()) for name, gradient in truth.items())


def main():
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right = True
    for stage in (2, 3):
        for name, (step, alone) in STEPS.items():
            engine, *_ = deepspeed.initialize(model=encoder(), config=config(stage))
            step(engine, rank)
            worst = error(dict(engine.engine.grads().items()), alone(ranks))
            right = right and worst < 1e-9
            if rank == 0:
                print(f"zero{stage}, {name}: largest error {worst:.1e}", flush=True)
        worst = error(mixed(stage, rank), alone_mixed(ranks))
        right = right and worst < 1e-9
        if rank == 0:
            print(f"zero{stage}, mixed: largest error {worst:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
