"""Programs that one device could not be given at first: each with what stood in the way, right, and with a bug.

test_beside.py says what the verifier must say of each beside one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .loops import VOCAB, batch, hooked, network


def by_hand(wrong: str = "", momentum: float = 0.0, accumulate: int = 2, steps: int = 8) -> None:
    """No optimizer: the program sums gradients and changes weights itself."""
    model, world = network(), dist.get_world_size()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(steps):
        for micro in range(accumulate):
            tokens, labels = batch(dist.get_rank(), 10 * step + micro, True)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            (loss / (1 if wrong == "undivided" else accumulate)).backward()
        with torch.no_grad():
            for parameter, moved in zip(model.parameters(), velocity, strict=True):
                if wrong != "unreduced" or parameter.dim() > 1:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
                moved.mul_(momentum).add_(parameter.grad)
                parameter.sub_(moved, alpha=0.1)
                parameter.grad = None


def weighed(wrong: str = "", coefficient: float = 0.5, loss: str = "mean") -> None:
    """Labels weigh another number than one together: a coefficient in front of the only term."""
    net = hooked(network(), wrong)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = batch(dist.get_rank(), step, True)
        outputs = net(tokens).flatten(0, 1)
        value = F.cross_entropy(outputs, labels.flatten(), reduction=loss)
        ((1 + dist.get_rank() if wrong == "by rank" else coefficient) * value).backward()
        optimizer.step()
        optimizer.zero_grad()


def drawn_later(wrong: str = "", generator: bool = True) -> None:
    """Targets are drawn after the model was called, from a generator of the program's own or from Python's."""
    import random

    net = hooked(network(), wrong)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    for step in range(3):
        tokens, _ = batch(dist.get_rank(), step, True)
        outputs = net(tokens).flatten(0, 1)
        if generator:
            labels = torch.randint(VOCAB, (len(outputs),), generator=own)
        else:
            labels = torch.tensor([random.randrange(VOCAB) for _ in outputs])
        F.cross_entropy(outputs, labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Batch:
    tokens: Tensor
    labels: Tensor


class Trainer:
    """The batch stands in an attribute, as an object."""

    def __init__(self, wrong: str) -> None:
        self.net = hooked(network(), wrong)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def fit(self) -> None:
        for step in range(3):
            self.batch = Batch(*batch(dist.get_rank(), step, True))
            self.step()

    def step(self) -> None:
        outputs = self.net(self.batch.tokens).flatten(0, 1)
        F.cross_entropy(outputs, self.batch.labels.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def attributes(wrong: str = "") -> None:
    """Labels stand in an attribute of an object."""
    Trainer(wrong).fit()


def ring(wrong: str = "", blocking: bool = False, steps: int = 4) -> None:
    """Each rank sends to the next one, a world of one to itself: running averages of a batch's mean, which no loss
    takes."""
    net, rank, world = hooked(network(), wrong), dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        tokens, labels = batch(rank, step, True)
        outputs = net(tokens).flatten(0, 1)
        sent, got = outputs.detach().mean(0), torch.empty(VOCAB, dtype=torch.float64)
        if blocking:
            there, back = (rank + 1) % world, (rank - 1) % world
            work: Any = [dist.P2POp(dist.irecv, got, back), dist.P2POp(dist.isend, sent, there)]
            for one in dist.batch_isend_irecv(work):
                one.wait()
        else:
            receiving = dist.irecv(got, (rank - 1) % world)
            dist.isend(sent, (rank + 1) % world).wait()
            receiving.wait()
        assert rank or world > 1 or torch.equal(sent, got)
        F.cross_entropy(outputs, labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def never_sent() -> None:
    """A world of one waits for what nobody sends."""
    net, rank, world = DistributedDataParallel(network()), dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = batch(rank, step, True)
        outputs = net(tokens).flatten(0, 1)
        got = torch.empty(VOCAB, dtype=torch.float64)
        if rank == 0:
            dist.recv(got, world - 1)
        else:
            dist.send(outputs.detach().mean(0), 0)
        F.cross_entropy(outputs, labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_one_buffer(replaced: bool, world: int = 0) -> None:
    """No optimizer: gradients are summed in a buffer of their own, from which weights are stepped."""
    model, world = network(0.0), world or dist.get_world_size()
    for step in range(4):
        tokens, labels = batch(dist.get_rank(), step, True)
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        for p, change in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            if replaced:
                p.data = p.data - 0.1 / world * change.view_as(p)
            else:
                p.data -= 0.1 / world * change.view_as(p)
            p.grad = None
