"""Bugs around DistributedDataParallel: accumulation, a clip that follows the loss, and a guard against overflow.

Every micro-batch is cut over the ranks: the mean that the probe takes over it does not depend on their number.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from isograd_verify.corpus.fsdp2 import MICRO_BATCHES
from isograd_verify.corpus.fsdp2 import share as of_labels
from isograd_verify.corpus.plain import HIDDEN, Mlp, batch, gather, move, my_rows, seeded, total, valid

WORLD, LAYOUT = 2, "dp2"
OVERFLOWS = 1  # the iteration whose loss is Inf on one rank: all skip their optimizer step

BUGS = {
    "mean-of-means": ("ranks", r"^(?!probe\.)"),
    "nosync-missing": ("dp|ranks", ".*"),
    "accum-overwritten": ("micro-batches", ".*"),
    "accum-undivided": ("micro-batches", ".*"),
    "cut-graph": ("dp|ranks", r"^probe\."),
    "clip-per-rank": ("dp|ranks", ".*"),
    "overflow-alone": ("rank", ""),
    "bf16-reduction": ("dp|ranks", ".*"),
    "unowned": ("", r"^norm\."),
}


over_ranks_and_back = move(total, total)  # every rank's loss uses the sum, so what comes back is summed, too


class Probe(nn.Module):
    """How much a micro-batch's tokens, on whichever ranks they are, look like their mean. It trains only itself."""

    cut_graph = False

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x.detach()).flatten(0, 1)
        own, tokens = x.sum(0), total(x.new_tensor(float(len(x))))
        whole = gather(own[None], 0).sum(0) if self.cut_graph else over_ranks_and_back(own)
        return F.cosine_similarity(x, whole / tokens, dim=-1).sum() / tokens


class Model(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.body(tokens)
        return self.head(x), self.probe(x)


def compressed(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """DDP takes torch's hook under its own name on GPUs only."""
    return bf16_compress_hook(state, bucket)


def share(model: nn.Module, tokens: Tensor, labels: Tensor, count: Tensor, bug: str) -> Tensor:
    """What this rank's part of a micro-batch adds to the step's loss."""
    logits, likeness = model(tokens)
    loss: Tensor = likeness / (1 if bug == "accum-undivided" else MICRO_BATCHES)
    return of_labels(logits, labels, count, bug) + loss


def train(bug: str, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = seeded(Model, seed)
    if bug == "cut-graph":
        plain.probe.cut_graph = True
    model = DistributedDataParallel(plain)
    if bug == "bf16-reduction":
        model.register_comm_hook(None, compressed)
    owned = dict(plain.named_parameters())
    if bug == "unowned":
        owned = {name: p for name, p in owned.items() if not name.startswith("norm")}
    optimizer = torch.optim.SGD(owned.values(), lr=0.1)

    for step in range(3):  # two and the one that overflows
        tokens, labels = batch(seed + step)
        count = valid(labels)
        loss = torch.zeros((), dtype=torch.float64)  # this rank's part of the step's
        for i in range(MICRO_BATCHES):
            mine, targets = (my_rows(part.tensor_split(MICRO_BATCHES)[i], rank, world) for part in (tokens, labels))
            if bug == "accum-overwritten":
                model.zero_grad()
            reduces = i == MICRO_BATCHES - 1 and bug != "nosync-missing"
            with nullcontext() if reduces else model.no_sync():
                part = share(model, mine, targets, count, bug)
                if step == OVERFLOWS and rank == seed % world:
                    part = part * math.inf
                (part * world).backward()  # DDP will divide by world
            loss += part.detach()

        overflow, limit = loss.isinf().int(), 0.05 * loss
        if bug != "overflow-alone":
            overflow = total(overflow)
        if bug != "clip-per-rank":
            limit = total(limit)
        if not overflow:
            nn.utils.clip_grad_norm_(model.parameters(), float(limit))
            optimizer.step()
        model.zero_grad()
