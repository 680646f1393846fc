"""The data-parallel peers, each used as its own documentation shows: every rank's mean loss, averaged over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestant import Contestant, Entry, adamw
from benchmarks.model import Decoder
from benchmarks.task import LR, Batch, Sizes


class DDP(Contestant):
    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.model = DistributedDataParallel(Decoder(sizes), gradient_as_bucket_view=True)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return adamw(self.model.parameters())

    def backward(self, batch: Batch) -> None:
        mine = batch.share(self.rank, self.world)
        self.model(mine.tokens, mine.labels).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.module.named_parameters():
            yield name, parameter.grad

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class ZeroRedundancy(DDP):
    def _optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LR,
            fused=True,
        )


class FSDP2(Contestant):
    def __init__(self, sizes: Sizes, rank: int, world: int, *, reshard: bool) -> None:
        self.rank, self.world = rank, world
        self.model, mesh = Decoder(sizes), init_device_mesh("cpu", (world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=mesh)  # the root stays whole until its backward, by default
        self.optimizer = adamw(self.model.parameters())

    def backward(self, batch: Batch) -> None:
        mine = batch.share(self.rank, self.world)
        self.model(mine.tokens, mine.labels).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            yield name, parameter.grad.full_tensor()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed(Contestant):
    """DeepSpeed's engine reads gradients only through its own helpers, at each stage."""

    def __init__(self, sizes: Sizes, rank: int, world: int, *, stage: int) -> None:
        import deepspeed

        self.rank, self.world = rank, world
        model = Decoder(sizes)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": sizes.batch // world,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        deepspeed.init_distributed("gloo", verbose=False)
        self.engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]

    def backward(self, batch: Batch) -> None:
        mine = batch.share(self.rank, self.world)
        self.engine.backward(self.engine(mine.tokens, mine.labels))

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self.engine.module.named_parameters():
            yield name, safe_get_full_grad(parameter)

    def update(self) -> None:
        self.engine.step()


def gradient_bytes(sizes: Sizes) -> int:
    return 4 * sizes.parameters()


def reduce_and_gather(sizes: Sizes, world: int) -> float:
    """Each gradient to its owner, each result back: 2 (W - 1) / W."""
    return 2 * (world - 1) / world * gradient_bytes(sizes)


def gather_twice(sizes: Sizes, world: int) -> float:
    """Blocks that are freed after forward come a second time for backward: 3 (W - 1) / W of them, and 2 of the rest."""
    rest = 4 * (2 * sizes.vocab * sizes.hidden + sizes.hidden)
    return (world - 1) / world * (3 * gradient_bytes(sizes) - rest)


DDP_ENTRY = Entry("DDP", DDP, reduce_and_gather)
PEERS = [
    DDP_ENTRY,
    Entry("ZeroRedundancyOptimizer", ZeroRedundancy, reduce_and_gather),
    Entry("FSDP2 kept", partial(FSDP2, reshard=False), reduce_and_gather),
    Entry("FSDP2 reshard", partial(FSDP2, reshard=True), gather_twice),
]
HAS_DEEPSPEED = find_spec("deepspeed") is not None
if HAS_DEEPSPEED:
    PEERS += [
        Entry(f"DeepSpeed ZeRO-{stage}", partial(DeepSpeed, stage=stage), reduce_and_gather) for stage in (0, 1, 2)
    ]
    PEERS.append(Entry("DeepSpeed ZeRO-3", partial(DeepSpeed, stage=3), gather_twice))
