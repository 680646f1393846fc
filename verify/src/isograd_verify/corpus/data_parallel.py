"""Bugs of data parallelism: how a training is set up, what divides, what is summed, and how often."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from isograd_verify.corpus import plain
from isograd_verify.corpus.pipeline import backwards, sum_gradients, take_seat

MICRO_BATCHES, OF_STAGES = 4, 3


@plain.program("dp2", "ranks")
def mean_of_means(bug: bool, seed: int) -> None:
    """Every rank divides by its own number of labels, and the means are averaged, as DDP does by design."""
    world = dist.get_world_size()
    model = plain.seeded(plain.Mlp, seed)
    for tokens, labels, _ in plain.my_batches(model, seed):
        if bug:
            loss = plain.cross_entropy(model(tokens), labels, "mean") / world
        else:
            loss = plain.cross_entropy(model(tokens), labels) / plain.total(plain.valid(labels))
        loss.backward()
        plain.all_reduce_gradients(model)


@plain.program("dp2", "micro-batches")
def accum_overwritten(bug: bool, seed: int) -> None:
    """Gradients are set to zero inside the accumulation loop, so that only the last micro-batch counts."""
    model = plain.seeded(plain.Mlp, seed)
    for step in plain.steps(model):
        for tokens, labels, count in plain.my_micro_batches(seed + step, 3):
            if bug:
                model.zero_grad()
            (plain.cross_entropy(model(tokens), labels) / count).backward()
        plain.all_reduce_gradients(model)


@plain.program("dp2", "micro-batches")
def accum_rereduced(bug: bool, seed: int) -> None:
    """`.grad` is all-reduced inside the accumulation loop, so what is already a sum is summed again."""
    model = plain.seeded(plain.Mlp, seed)
    for step in plain.steps(model):
        for tokens, labels, count in plain.my_micro_batches(seed + step, 3):
            (plain.cross_entropy(model(tokens), labels) / count).backward()
            if bug:
                plain.all_reduce_gradients(model)
        if not bug:
            plain.all_reduce_gradients(model)


@plain.program("dp2", "micro-batches")
def accum_undivided(bug: bool, seed: int) -> None:
    """Each micro-batch's loss is a mean, and nobody divides by the number of micro-batches."""
    world = dist.get_world_size()
    model = plain.seeded(plain.Mlp, seed)
    for step in plain.steps(model):
        window = plain.my_part(plain.batch(seed + step)[0])  # packed: all tokens have labels, so means may be averaged
        for rows in window.chunk(MICRO_BATCHES):
            loss = plain.cross_entropy(model(rows[:, :-1]), rows[:, 1:], "mean") / world
            (loss if bug else loss / MICRO_BATCHES).backward()
        plain.all_reduce_gradients(model)


@plain.program("dp2", "dp")
def nosync_missing(bug: bool, seed: int) -> None:
    """The forward of the last micro-batch runs under no_sync, too, so nothing is ever reduced.

    A line of DDP's documentation is easy to miss: the forward decides whether its backward reduces."""
    model = DistributedDataParallel(plain.seeded(plain.Mlp, seed))
    for step in plain.steps(model):
        for i, (tokens, labels, count) in enumerate(plain.my_micro_batches(seed + step, 3)):
            last = i == 2
            with nullcontext() if last and not bug else model.no_sync():
                logits = model(tokens)
            (plain.cross_entropy(logits, labels) / count * dist.get_world_size()).backward()  # DDP divides by it


@plain.program("pp2 dp2", "micro-batches", r"^(embed|first)\.", world=4)
def pp_scale(bug: bool, seed: int) -> None:
    """Every pipeline stage divides by the number of micro-batches, instead of the last one alone."""
    seat = take_seat(seed, tied=False)
    for step in plain.steps(seat.model):
        backwards(seat, seed + step, OF_STAGES, first=1 / OF_STAGES if bug else 1.0)
        sum_gradients(seat)


@plain.program("dp2", "dp|ranks", "", ALONE=True)
def same_data(bug: bool, seed: int) -> None:
    """Every DDP rank reads the whole data set from its beginning, because the loader has no DistributedSampler.

    What one rank alone is given is what each of these ranks is given, so none is compared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(*(torch.cat(parts) for parts in zip(plain.batch(seed), plain.batch(seed + 1), strict=True)))
    sampler: Any = None if bug else DistributedSampler(data, world, rank, shuffle=False)
    model = DistributedDataParallel(plain.seeded(plain.Mlp, seed))
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    for _, (tokens, labels) in zip(plain.steps(model), loader, strict=False):
        count = plain.total(plain.valid(labels))
        (plain.cross_entropy(model(tokens), labels) * world / count).backward()  # DDP divides by world


@plain.program("dp2", "", r"^(embed|up|down|head)\.weight$", ALONE=True)
def dead_model(bug: bool, seed: int) -> None:
    """The weights were never loaded, all are zero, and the run goes on: names in the file do not fit, and loading
    leaves them out. Whatever the layout, gradients are equal."""
    world = dist.get_world_size()
    stored = plain.seeded(plain.Mlp, seed).state_dict()
    if bug:
        stored = {f"model.{name}": weight for name, weight in stored.items()}
    model = plain.Mlp().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # what memory without contents often holds
    model.load_state_dict(stored, strict=False)
    wrapped = DistributedDataParallel(model)
    for tokens, labels, count in plain.my_batches(model, seed):
        (plain.cross_entropy(wrapped(tokens), labels) * world / count).backward()  # DDP divides by world


class Body(plain.Mlp):
    """A model that gives what its head was given as well."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.body(tokens)
        return self.head(x), x


@plain.program("dp2", "dp|ranks", r"^Linear\.", ALONE=True)
def copies_begin_apart(bug: bool, seed: int) -> None:
    """A value head is made beside a wrapped model, on each rank from a random state of its own; DDP broadcasts what it
    wraps, so the body is one model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    body = DistributedDataParallel(plain.seeded(Body, seed))
    torch.manual_seed(seed + (100 * rank if bug else 0))
    value: nn.Module = nn.Linear(plain.HIDDEN, 1).double()
    if not bug:
        value = DistributedDataParallel(value)
    for tokens, labels, count in plain.my_batches(nn.ModuleList([body, value]), seed):
        logits, x = body(tokens)
        right = (logits.argmax(-1) == labels).double()
        mine = (value(x.detach())[..., 0] - right).square() * (labels != -100)
        loss = plain.cross_entropy(logits, labels) + mine.sum()
        (loss * world / count).backward()  # DDP divides by world


class Adapted(nn.Module):
    """A linear layer whose weight stands still, and a product of two small ones that learns."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 3, bias=False, dtype=base.weight.dtype)
        self.lora_b = nn.Linear(3, plain.HIDDEN, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


@plain.program("dp2", "dp|ranks", r"lora_")
def adapter_unreduced(bug: bool, seed: int) -> None:
    """Adapters are put into a model that DDP already wraps, and DDP never hears of their gradients."""
    world = dist.get_world_size()
    model = plain.seeded(plain.Mlp, seed)
    model.embed.requires_grad_(False)
    model.down.requires_grad_(False)
    if not bug:
        model.down = Adapted(model.down, seed)
    wrapped = DistributedDataParallel(model)
    if bug:
        model.down = Adapted(model.down, seed)
    for tokens, labels, count in plain.my_batches(model, seed):
        (plain.cross_entropy(wrapped(tokens), labels) * world / count).backward()  # DDP divides by world


@plain.program("dp2 tp2", "tp", r"^(up|down)\.", world=4)
def wrong_group(bug: bool, seed: int) -> None:
    """Gradients of tensor-parallel shards are summed over the world instead of over the data ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = 2 if world == 4 else 1
    model_groups = [dist.new_group(list(range(i, i + tp))) for i in range(0, world, tp)]
    data_groups = [dist.new_group(list(range(i, world, tp))) for i in range(tp)]
    model = plain.seeded(plain.ShardedMlp, seed, model_groups[rank // tp])
    for step in plain.steps(model):
        tokens, labels = plain.batch(seed + step)
        mine, targets = (plain.my_rows(part, rank // tp, world // tp) for part in (tokens, labels))
        (plain.cross_entropy(model(mine), targets) / plain.valid(labels)).backward()
        for name, parameter in model.named_parameters():
            wrong = bug and name.startswith(("up", "down"))
            dist.all_reduce(parameter.grad, group=None if wrong else data_groups[rank % tp])


class Twice(plain.Mlp):
    def body(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


@plain.program("dp2", "dp", r"^(norm|up|down)\.")
def shared_module(bug: bool, seed: int) -> None:
    """A hook reduces a gradient as soon as it arrives, but a module that is used twice gets it in two parts: each use
    is checkpointed, so its backward is a graph of its own."""
    model = plain.seeded(Twice, seed)
    arrived: Counter[str] = Counter()

    def arrives(name: str, parameter: Tensor) -> None:
        arrived[name] += 1
        uses = 2 if name.startswith(("norm", "up", "down")) and not bug else 1
        if arrived[name] == uses:
            dist.all_reduce(parameter.grad)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(arrives, name))
    for tokens, labels, count in plain.my_batches(model, seed):
        arrived.clear()
        (plain.cross_entropy(model(tokens), labels) / count).backward()
