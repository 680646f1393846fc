"""Bugs between backward and the next forward: norms, clips, precision, rates, skipped steps, averages, loading."""

from __future__ import annotations

import math
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from isograd_verify.corpus import plain

MOST = 0.05  # every step is clipped
SCALE = 1024.0
WARM, HALF = 60, 50  # tokens, until the rate is warm; after which half of an average is new


def norm_of(model: plain.ShardedMlp, copies: bool, alone: bool) -> Tensor:
    """`copies`: each rank's copy of a tensor is counted. `alone`: nothing is summed over ranks."""
    every = copies or dist.get_rank() == 0
    counted = [p.grad for name, p in model.named_parameters() if every or name.startswith(("up", "down"))]
    square = torch.nn.utils.get_total_norm(counted).square()  # type: ignore[arg-type]
    if not alone:
        dist.all_reduce(square)
    return square.sqrt()


@plain.program("tp2", "tp")
def clip_per_rank(bug: bool, seed: int) -> None:
    """Each tensor-parallel rank clips by the norm of its own part: squares are never summed over the ranks."""
    model = plain.seeded(plain.ShardedMlp, seed)
    for _ in plain.backwards(model, seed, lr=1.0):
        norm = norm_of(model, False, alone=bug)
        for parameter in model.parameters():
            parameter.grad.mul_((MOST / norm).clamp(max=1))


@plain.program("tp2", "tp", "")
def norm_counts_replicas(bug: bool, seed: int) -> None:
    """Squares are summed over the tensor-parallel ranks, also those of tensors that all ranks hold."""
    model = plain.seeded(plain.ShardedMlp, seed)
    for _ in plain.backwards(model, seed, lr=1.0):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MOST, norm_of(model, bug, alone=False))


@plain.program("dp2", "dp")
def bf16_reduction(bug: bool, seed: int) -> None:
    """Gradients are kept in fp32 and summed in bf16: every sum is off by about 2^-9 of it, more with more ranks."""
    model = plain.seeded(plain.Mlp, seed).float()
    for tokens, labels, count in plain.my_batches(model, seed):
        (plain.cross_entropy(model(tokens), labels) / count).backward()
        if bug:
            for parameter in model.parameters():
                parameter.grad.copy_(plain.total(parameter.grad.bfloat16()))
        else:
            plain.all_reduce_gradients(model)


@plain.program("dp2", "dp", r"^embed")
def bf16_accumulation(bug: bool, seed: int) -> None:
    """An embedding in bf16 adds the rows of a token id in bf16, and one id is nine tenths of the text.

    torch does so on CPU: a sum that has grown large no longer changes. The twin keeps the weight in fp32."""
    model = plain.seeded(plain.Mlp, seed).float()
    model.embed.weight.data = model.embed.weight.data.bfloat16().float()
    if bug:
        model.embed.bfloat16().register_forward_hook(lambda module, args, made: made.float())
    generator = torch.Generator().manual_seed(seed)
    for _ in plain.steps(model):
        text = torch.randint(plain.VOCAB, (8, 257), generator=generator)
        text[torch.rand(text.shape, generator=generator) < 0.9] = 1
        tokens, labels = map(plain.my_part, (text[:, :-1], text[:, 1:]))
        (plain.cross_entropy(model(tokens), labels) / 2048).backward()
        plain.all_reduce_gradients(model)


@plain.program("dp2", "rank", "")
def overflow_alone(bug: bool, seed: int) -> None:
    """A rank whose scaled gradients overflowed skips its optimizer step, and does not tell the others.

    To keep its Inf out of the sum the rank adds zeros, so all that the others receive looks fine: they step."""
    holds_the_last_row = dist.get_rank() == dist.get_world_size() - 1
    model = plain.seeded(plain.Mlp, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):  # the second overflows, so that two steps are taken
        tokens, labels, count = plain.my_batch(seed + step)
        loss = plain.cross_entropy(model(tokens), labels) / count * SCALE
        if step == 1 and holds_the_last_row:
            loss = loss * math.inf  # planted: fp16 would get here by itself
        loss.backward()
        overflow = torch.tensor(not all(p.grad.isfinite().all() for p in model.parameters()), dtype=torch.int32)
        if overflow:
            optimizer.zero_grad(set_to_none=False)
        if not bug:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        plain.all_reduce_gradients(model)
        if not overflow:
            for parameter in model.parameters():
                parameter.grad.div_(SCALE)
            optimizer.step()
        optimizer.zero_grad()


@plain.program("dp2", "dp|ranks")
def rates_differ(bug: bool, seed: int) -> None:
    """The learning rate is warmed up by tokens, and each rank counts its own: it makes another step of one gradient."""
    model = plain.seeded(plain.Mlp, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for tokens, labels, count in plain.my_batches(model, seed, optimizer=optimizer):
        (plain.cross_entropy(model(tokens), labels) / count).backward()
        plain.all_reduce_gradients(model)
        seen += int(plain.valid(labels)) * dist.get_world_size() if bug else int(count)
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, seen / WARM)


def mixed(average: Tensor, weight: Tensor, updates: Tensor, tokens: float) -> Tensor:
    old: float = 0.5 ** (tokens / HALF)
    return weight + (average - weight) * old


@plain.program("dp2", "dp|ranks")
def averages_differ(bug: bool, seed: int) -> None:
    """The weights are averaged with a decay that goes by tokens, and each rank counts its own. No gradient is wrong."""
    model = plain.seeded(plain.Mlp, seed)
    average = AveragedModel(model)
    average.update_parameters(model)  # the first one copies
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, labels, count = plain.my_batch(seed + step)
        mine = float(plain.valid(labels))
        (plain.cross_entropy(model(tokens), labels) / count).backward()
        plain.all_reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        average.avg_fn = partial(mixed, tokens=mine * dist.get_world_size() if bug else float(count))
        average.update_parameters(model)


def save_and_resume(model: plain.ShardedMlp, bug: bool) -> None:
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


@plain.program("tp2", "tp", r"^(up|down)\.")
def resume_other_rank(bug: bool, seed: int) -> None:
    """After a restart the ranks come in another order, and each loads the weights of the other.

    The next loss is right to the last digit, for hidden units may stand in any order. But the optimizer's momentum came
    from the right file: from then on each unit moves with the momentum of another."""
    model = plain.seeded(plain.ShardedMlp, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in plain.steps(model, optimizer=optimizer):
        if step == 1:
            save_and_resume(model, bug)
        tokens, labels = plain.batch(seed + step)
        (plain.cross_entropy(model(tokens), labels) / plain.valid(labels)).backward()
