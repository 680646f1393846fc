"""The pipeline peer: torch.distributed.pipelining, as its documentation shows for a loss that is a sum.

Every rank is given the whole batch; the schedule cuts it into micro-batches, and `scale_grads=False` keeps it from
dividing gradients by their number. The loss is the sum over labels divided by the batch's count, so gradients are those
of one device on uneven labels too. Stages hold what isograd's balanced split gives them; "equal split" is what torch's
tutorials do, as many layers for each stage, the head on top of the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.contestant import Contestant, Entry, adamw
from benchmarks.model import Decoder
from benchmarks.task import IGNORE, Batch, Sizes
from isograd.pipeline.schedule import Action, Timed
from isograd.pipeline.split import balanced, ranges


class Part(nn.Module):
    """One stage of the plain decoder, its parameters under their own names."""

    def __init__(self, whole: Decoder, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = whole.embed if first else None
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in layers})
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


class TorchPipeline(Contestant):
    def __init__(
        self, sizes: Sizes, rank: int, world: int, *, schedule: Any, vpp: int = 1, equal: bool = False
    ) -> None:
        self.rank, self.world, self.last = rank, world, rank == world - 1
        stages = world * vpp
        whole = Decoder(sizes)
        parts = ranges(equal_split(sizes, stages) if equal else split(sizes, world, vpp), stages, sizes.layers)
        mine = range(rank, stages, world)
        self.parts = nn.ModuleList(Part(whole, parts[s], s == 0, s == stages - 1) for s in mine)
        made = [PipelineStage(p, s, stages, torch.device("cpu")) for s, p in zip(mine, self.parts, strict=True)]
        single = issubclass(schedule, PipelineScheduleSingle)
        self.schedule = schedule(
            made[0] if single else made, sizes.micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self.optimizer = adamw(self.parts.parameters())
        self.count = 0
        self._timeline: list[Timed] = []
        self._clocked(made)

    def _clocked(self, stages: Sequence[PipelineStage]) -> None:
        """Note when each action ran. The loss of a micro-batch is a part of its forward, as in isograd's."""
        loss = self.schedule._maybe_compute_loss

        def with_loss(stage: Any, output: Any, targets: Any, micro: int, *rest: Any) -> None:
            loss(stage, output, targets, micro, *rest)
            if stage.is_last:
                number = max(
                    n for n, timed in enumerate(self._timeline) if timed.action[1:] == (stage.stage_index, micro)
                )
                self._timeline[number] = self._timeline[number]._replace(end=time.perf_counter())

        self.schedule._maybe_compute_loss = with_loss
        for stage in stages:
            stage.forward_one_chunk = self._timed("F", stage, stage.forward_one_chunk)
            stage.backward_one_chunk = self._timed("B", stage, stage.backward_one_chunk)
            stage.backward_weight_one_chunk = self._timed("W", stage, stage.backward_weight_one_chunk)

    def _timed(self, kind: str, stage: PipelineStage, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(micro: int, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            made = run(micro, *args, **kwargs)
            called = "I" if kind == "B" and not kwargs.get("full_backward", True) else kind
            self._timeline.append(Timed(Action(called, stage.stage_index, micro), began, time.perf_counter()))
            return made

        return timed

    def timeline(self) -> list[Timed]:
        return self._timeline

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return sums / self.count

    def backward(self, batch: Batch) -> None:
        self.count = batch.count
        self._timeline.clear()
        given = (batch.tokens,) if self.rank == 0 else ()
        self.schedule.step(*given, target=batch.labels if self.last else None, return_outputs=False)

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        mine = {name: p.grad for part in self.parts for name, p in part.named_parameters()}
        lists: list[Any] = [None] * self.world
        dist.all_gather_object(lists, {name: tuple(g.shape) for name, g in mine.items()})
        for source, names in enumerate(lists):
            for name, shape in names.items():
                gradient = mine[name] if source == self.rank else torch.empty(shape)
                dist.broadcast(gradient, source)
                yield name, gradient

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def split(sizes: Sizes, pp: int, vpp: int) -> Sequence[int]:
    """What isograd's Transformer would choose: blocks and head cost what they multiply."""
    block = 4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.mlp
    return balanced([float(block)] * sizes.layers, pp * vpp, last=float(sizes.hidden * sizes.vocab), ranks=pp)


def equal_split(sizes: Sizes, stages: int) -> Sequence[int]:
    return [sizes.layers // stages + (s < sizes.layers % stages) for s in range(stages)]


def passed_bytes(sizes: Sizes, world: int, vpp: int = 1) -> float:
    """The stream leaves each stage but the last, its gradient each but the first: of the rank that sends most."""
    last = world * vpp - 1
    sent = [sum((s < last) + (s > 0) for s in range(rank, last + 1, world)) for rank in range(world)]
    return max(sent) * sizes.batch * sizes.seq * sizes.hidden * 4


_interleaved = partial(passed_bytes, vpp=2)
PEERS = [
    Entry("torch 1F1B", partial(TorchPipeline, schedule=Schedule1F1B), passed_bytes),
    Entry("torch 1F1B, equal split", partial(TorchPipeline, schedule=Schedule1F1B, equal=True), passed_bytes),
    Entry("torch GPipe", partial(TorchPipeline, schedule=ScheduleGPipe), passed_bytes),
    Entry(
        "torch interleaved",
        partial(TorchPipeline, schedule=ScheduleInterleaved1F1B, vpp=2),
        _interleaved,
    ),
    Entry(
        "torch zero-bubble",
        partial(TorchPipeline, schedule=ScheduleInterleavedZeroBubble),
        passed_bytes,
    ),
    Entry(
        "torch zero-bubble vpp2",
        partial(TorchPipeline, schedule=ScheduleInterleavedZeroBubble, vpp=2),
        _interleaved,
    ),
]
