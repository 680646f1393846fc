"""What every contestant offers: a step on the global batch, and its full gradients by name.

`backward` takes this rank's part of the batch itself. `grads`, between backward and update, gives each gradient as the
contestant would apply it, whole, under the plain model's names; all ranks iterate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.model import Decoder
from benchmarks.task import LR, Batch, Sizes
from isograd.pipeline.schedule import Timed


class Contestant(ABC):
    @abstractmethod
    def backward(self, batch: Batch) -> None: ...

    @abstractmethod
    def grads(self) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def update(self) -> None: ...

    def step(self, batch: Batch) -> None:
        self.backward(batch)
        self.update()

    def timeline(self) -> list[Timed]:
        """Of a pipeline: what this rank did when in the latest step."""
        return []

    def finish(self) -> None:  # noqa: B027  (most have nothing left to do)
        """Complete what a step left under way. Called inside the clock: nobody finishes in another's turn."""


Build = Callable[[Sizes, int, int], Contestant]  # (sizes, rank, world)


@dataclass(frozen=True)
class Entry:
    """A contestant in the list: how to build it, and the bytes it cannot avoid to send per rank and step."""

    name: str
    build: Build
    bound: Callable[[Sizes, int], float]  # (sizes, world)
    alone: bool = False  # one process: rank 0 works, the others wait
    peers: tuple[str, ...] = ()  # of ours: the entries that do the same; it is compared with the fastest of them


def adamw(parameters: Iterable[nn.Parameter] | list[dict[str, list[nn.Parameter]]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


class OneProcess(Contestant):
    """The reference: plain torch on the whole batch."""

    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        self.model = Decoder(sizes)
        self.optimizer = adamw(self.model.parameters())

    def backward(self, batch: Batch) -> None:
        self.model(batch.tokens, batch.labels).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            yield name, parameter.grad

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def nothing(sizes: Sizes, world: int) -> float:
    return 0.0


ONE = Entry("one process", OneProcess, nothing, alone=True)
