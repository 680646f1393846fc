"""isograd as a contestant: its Engine around the plain model over data axes, its own Transformer over tp and cp."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import isograd as ig
from benchmarks.contestant import Contestant, Entry, adamw
from benchmarks.data_peers import gather_twice, reduce_and_gather
from benchmarks.model import Decoder
from benchmarks.sequence_peers import PEERS, ring_bytes, ulysses_bytes
from benchmarks.task import Batch, Sizes
from benchmarks.tensor_peers import stream_bytes


class Isograd(Contestant):
    engine: ig.Engine

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.engine.grads().items()

    def update(self) -> None:
        self.engine.step()


class IsogradData(Isograd):
    """The model code of the peers, as it is: a foreign module, whose parameters owe the data axes."""

    def __init__(self, sizes: Sizes, rank: int, world: int, *, zero: int, keep: bool = False) -> None:
        self.mesh = ig.Mesh(ig.Layout(dp=world, zero=zero))
        self.model = Decoder(sizes)
        self.engine = ig.Engine(self.model, self.mesh, adamw, keep_gathered=keep)

    def backward(self, batch: Batch) -> None:
        mine = batch.share(self.mesh.index("dp cp"), self.mesh.size("dp cp"))
        self.engine.backward(self.model(mine.tokens, mine.labels), weight=mine.count)


class IsogradDropIn(Contestant):
    """In DDP's place, with the line that weighs."""

    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.model = ig.DataParallel(Decoder(sizes))
        self.optimizer = adamw(self.model.parameters())

    def backward(self, batch: Batch) -> None:
        mine = batch.share(self.rank, self.world)
        loss = self.model(mine.tokens, mine.labels)
        self.model.weigh(loss, mine.count).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.module.named_parameters():
            assert parameter.grad is not None
            yield name, parameter.grad

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class IsogradModel(Isograd):
    """isograd's own model, which takes its part of the batch itself."""

    def __init__(self, sizes: Sizes, layout: ig.Layout) -> None:
        self.mesh = ig.Mesh(layout)
        config = ig.models.TransformerConfig(
            vocab=sizes.vocab, hidden=sizes.hidden, layers=sizes.layers, heads=sizes.heads, mlp=sizes.mlp
        )
        self.model = ig.models.Transformer(config, self.mesh)
        take(self.model, Decoder(sizes), self.mesh)
        self.engine = ig.Engine(self.model, self.mesh, adamw)

    def backward(self, batch: Batch) -> None:
        loss, count = self.model(batch.tokens, batch.labels)
        self.engine.backward(loss, weight=count)


class IsogradTensor(IsogradModel):
    def __init__(self, sizes: Sizes, rank: int, world: int, *, sequence: bool) -> None:
        super().__init__(sizes, ig.Layout(tp=world, sp=sequence and world > 1))


class IsogradSequence(IsogradModel):
    def __init__(self, sizes: Sizes, rank: int, world: int, *, method: str) -> None:
        super().__init__(sizes, ig.Layout.parse(f"cp{world} {method}"))


@torch.no_grad()
def take(model: ig.models.Transformer, plain: Decoder, mesh: ig.Mesh) -> None:
    """The plain model's weights, each rank its part."""
    source = dict(plain.named_parameters())
    for record in ig.contracts(model, mesh):
        box = tuple(slice(start, stop) for start, stop in record.contract.local(mesh))
        record.parameter.copy_(source[record.name][box])


DATA = [
    Entry("isograd zero0", partial(IsogradData, zero=0), reduce_and_gather, peers=("DDP", "DeepSpeed ZeRO-0")),
    *(
        Entry(
            f"isograd zero{zero}",
            partial(IsogradData, zero=zero),
            reduce_and_gather,
            peers=("DDP", "ZeroRedundancyOptimizer", f"DeepSpeed ZeRO-{zero}"),
        )
        for zero in (1, 2)
    ),
]
DATA += [
    Entry("isograd DataParallel", IsogradDropIn, reduce_and_gather, peers=("DDP",)),
    Entry("isograd zero3 kept", partial(IsogradData, zero=3, keep=True), reduce_and_gather, peers=("FSDP2 kept",)),
    Entry("isograd zero3", partial(IsogradData, zero=3), gather_twice, peers=("FSDP2 reshard", "DeepSpeed ZeRO-3")),
]
TENSOR = [
    Entry("isograd tp", partial(IsogradTensor, sequence=False), stream_bytes, peers=("DTensor TP",)),
    Entry("isograd tp sp", partial(IsogradTensor, sequence=True), stream_bytes, peers=("DTensor TP + SP",)),
]
SEQUENCE = [
    Entry("isograd ulysses", partial(IsogradSequence, method="ulysses"), ulysses_bytes, peers=(PEERS[0].name,)),
    Entry("isograd ring", partial(IsogradSequence, method="ring"), ring_bytes, peers=(PEERS[0].name,)),
]
