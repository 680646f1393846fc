"""What no implementation can leave out, as contestants: matrix products, attention, the optimizer, and the messages.

They train nothing: a floor multiplies matrices of the sizes that a rank of the task multiplies, calls torch's attention
forward and backward, updates as many parameters, and sends as many bytes to the same ranks in the same order. It has no
norms, activations, rotations, residual sums, loss, autograd graph or bookkeeping. Nobody can win more of a peer's time
than what lies above its floor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestant import Contestant, Entry, adamw
from benchmarks.pipeline_peers import passed_bytes, split
from benchmarks.sequence_peers import ulysses_bytes
from benchmarks.task import Batch, Sizes
from benchmarks.tensor_peers import stream_bytes
from isograd.pipeline.schedule import Action, Timed, build
from isograd.pipeline.split import ranges


class Layers:
    """The products of some layers, and perhaps of the head, of which a rank has one part in `parts`."""

    def __init__(self, sizes: Sizes, rows: int, layers: int, head: bool, parts: int) -> None:
        hidden, inner, mlp, vocab = sizes.hidden, *(n // parts for n in (sizes.hidden, sizes.mlp, sizes.vocab))
        shapes = [(inner, hidden)] * 3 + [(hidden, inner)] + [(mlp, hidden)] * 2 + [(hidden, mlp)]
        self.weights = [torch.randn(shape) for _ in range(layers) for shape in shapes]
        self.weights += [torch.randn(vocab, hidden)] if head else []
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        self.x = {size: torch.randn(rows, size) for size in {hidden, inner, mlp, vocab}}
        self.heads = [
            torch.randn(
                rows // sizes.seq, sizes.heads // parts, sizes.seq, sizes.hidden // sizes.heads
            ).requires_grad_()
            for _ in range(3)
        ]
        self.layers = layers
        self._attended: list[Tensor] = []

    def forward(self) -> None:
        for weight in self.weights:
            _ = self.x[weight.shape[1]] @ weight.t()
        for _ in range(self.layers):
            self._attended.append(F.scaled_dot_product_attention(*self.heads, is_causal=True))

    def inputs(self) -> None:
        """The gradients of all inputs."""
        for weight in self.weights:
            _ = self.x[weight.shape[0]] @ weight
        for _ in range(self.layers):
            y = self._attended.pop(0)
            torch.autograd.grad(y, self.heads, y.detach())

    def gradients(self) -> None:
        """The gradients of all weights, added up."""
        for weight in self.weights:
            assert weight.grad is not None
            weight.grad.addmm_(self.x[weight.shape[0]].t(), self.x[weight.shape[1]])


class Floor(Contestant):
    def grads(self) -> Iterator[tuple[str, Tensor]]:
        raise SystemExit("a floor has no gradients: say --no-errors")

    def updated(self, count: int) -> None:
        """As many parameters as somebody trains here."""
        self.parameter = nn.Parameter(torch.zeros(count))
        self.parameter.grad = torch.zeros(count)
        self.optimizer = adamw([self.parameter])

    def update(self) -> None:
        self.optimizer.step()


class PipelineFloor(Floor):
    """The actions of a schedule in its order, each nothing but its products, and its messages."""

    def __init__(self, sizes: Sizes, rank: int, world: int, *, schedule: str, vpp: int = 1) -> None:
        self.rank, self.rows = rank, sizes.batch // sizes.micro_batches * sizes.seq
        self.schedule = build(schedule, world, vpp, sizes.micro_batches)
        stages = self.schedule.stages
        parts = ranges(split(sizes, world, vpp), stages, sizes.layers)
        self.stages = {
            s: Layers(sizes, self.rows, len(parts[s]), s == stages - 1, 1) for s in range(rank, stages, world)
        }
        self.message = torch.zeros(self.rows, sizes.hidden)
        count = sum(weight.numel() for stage in self.stages.values() for weight in stage.weights)
        self.updated(count + (sizes.vocab * sizes.hidden if rank == 0 else 0))
        self._timeline: list[Timed] = []

    def timeline(self) -> list[Timed]:
        return self._timeline

    def backward(self, batch: Batch) -> None:
        self._timeline.clear()
        sent: list[dist.Work | None] = []
        for action in self.schedule.orders[self.rank]:
            for need in self.schedule.needs(action):
                if self.schedule.rank_of(need.stage) != self.rank:
                    dist.recv(torch.empty_like(self.message), self.schedule.rank_of(need.stage), tag=self._tag(need))
            began = time.perf_counter()
            stage = self.stages[action.stage]
            if action.kind == "F":
                stage.forward()
            if action.kind in "BI":
                stage.inputs()
            if action.kind in "BW":
                stage.gradients()
            target = action.stage + {"F": 1, "W": self.schedule.stages}.get(action.kind, -1)
            if 0 <= target < self.schedule.stages and self.schedule.rank_of(target) != self.rank:
                sent.append(dist.isend(self.message, self.schedule.rank_of(target), tag=self._tag(action)))
            self._timeline.append(Timed(action, began, time.perf_counter()))
        for work in sent:
            assert work is not None
            work.wait()

    def _tag(self, action: Action) -> int:
        return ("FBI".index(action.kind) * self.schedule.stages + action.stage) * 1000 + action.micro


class Exchanges(Floor):
    """A floor whose ranks send one part to each other rank at a time."""

    part: Tensor
    arrived: Tensor

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def exchange(self) -> None:
        for distance in range(1, self.world):
            to, source = (self.rank + distance) % self.world, (self.rank - distance) % self.world
            for work in [dist.isend(self.part, to), dist.irecv(self.arrived, source)]:
                assert work is not None
                work.wait()


class TensorFloor(Exchanges):
    """A rank's part of every product, and the sums of the stream between all ranks, as exchanges of its parts."""

    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        super().__init__(rank, world)
        rows = sizes.batch * sizes.seq
        self.whole = Layers(sizes, rows, sizes.layers, True, world)
        self.part = torch.zeros(rows // world, sizes.hidden)
        self.arrived = torch.zeros_like(self.part)
        self.sums = 2 + 4 * sizes.layers  # as in stream_bytes
        self.updated(sizes.parameters() // world)

    def backward(self, batch: Batch) -> None:
        self.whole.forward()
        self.whole.inputs()
        self.whole.gradients()
        for _ in range(self.sums):
            self.exchange()  # parts of the sum to their owners
            self.part.add_(self.arrived, alpha=0.0)
            self.exchange()  # and back


class UlyssesFloor(Exchanges):
    """All products of a rank's tokens, attention of its heads over all tokens, what attention sends, and the sums of
    all gradients, block by block, with the update."""

    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        super().__init__(rank, world)
        rows, inner = sizes.batch * sizes.seq // world, sizes.hidden // world
        self.whole = Layers(sizes, rows, sizes.layers, True, 1)
        shape = sizes.batch, sizes.heads // world, sizes.seq, sizes.hidden // sizes.heads
        self.whole.heads = [torch.randn(shape).requires_grad_() for _ in range(3)]
        self.attention = [torch.zeros(rows, inner) for _ in range(2)]  # sent and arrived
        self.sent = 8 * sizes.layers  # q, k, v and what attention returns, forward and backward
        self.gradient = [torch.zeros(-(-sizes.parameters() // (sizes.layers * world))) for _ in range(2)]
        self.updated(sizes.parameters())
        self.layers = sizes.layers

    def backward(self, batch: Batch) -> None:
        self.whole.forward()
        self.whole.inputs()
        self.whole.gradients()
        self.part, self.arrived = self.attention
        for _ in range(self.sent):
            self.exchange()
        self.part, self.arrived = self.gradient
        for _ in range(self.layers):
            self.exchange()  # parts of the sum to their owners
            self.part.add_(self.arrived, alpha=0.0)
            self.exchange()  # and back


PIPELINE = [
    Entry("floor of 1f1b", partial(PipelineFloor, schedule="1f1b"), passed_bytes),
    Entry("floor of zb", partial(PipelineFloor, schedule="zb"), passed_bytes),
]
ULYSSES = [Entry("floor of ulysses", UlyssesFloor, ulysses_bytes)]
TENSOR = [Entry("floor", TensorFloor, stream_bytes)]
