"""resume-other-rank: after a restart the ranks come in another order, and each loads the weights of the other.

DeepSpeed #8226. The first loss is right to the last digit, for hidden units may stand in any order. But the optimizer's
momentum came from the right file: from then on each unit moves with the momentum of another.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from isograd_verify.corpus.plain import batch, cross_entropy, seeded, valid
from isograd_verify.corpus.sharded import ShardedMlp

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", r"^(up|down)\."


def save_and_resume(model: ShardedMlp, bug: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp(prefix="isograd-resume-") if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    home = Path(shared[0])
    save_file(model.state_dict(), home / f"rank-{rank}.safetensors")
    dist.barrier()
    rank_after_restart = world - 1 - rank if bug else rank
    model.load_state_dict(load_file(home / f"rank-{rank_after_restart}.safetensors"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(home)


def train(bug: bool, seed: int) -> None:
    model = seeded(ShardedMlp, seed)
    model.shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        if step == 1:
            save_and_resume(model, bug)
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
