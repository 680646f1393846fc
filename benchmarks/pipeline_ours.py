"""isograd's pipelines as contestants: its Transformer, and engine.train_step on the whole batch."""

from __future__ import annotations

from functools import partial

import isograd as ig
from benchmarks.contestant import Entry, adamw
from benchmarks.model import Decoder
from benchmarks.ours import Isograd, take
from benchmarks.pipeline_peers import passed_bytes, split
from benchmarks.task import Batch, Sizes
from isograd.pipeline.schedule import Timed


class IsogradPipeline(Isograd):
    def __init__(self, sizes: Sizes, rank: int, world: int, *, schedule: str, vpp: int = 1) -> None:
        self.mesh = ig.Mesh(ig.Layout(pp=world, vpp=vpp, schedule=schedule))
        self.micro_batches = sizes.micro_batches
        config = ig.models.TransformerConfig(
            vocab=sizes.vocab, hidden=sizes.hidden, layers=sizes.layers, heads=sizes.heads, mlp=sizes.mlp
        )
        self.model = ig.models.Transformer(config, self.mesh, split=split(sizes, world, vpp))
        take(self.model, Decoder(sizes), self.mesh)
        self.engine = ig.Engine(self.model, self.mesh, adamw)

    def step(self, batch: Batch) -> None:
        self.engine.train_step((batch.tokens, batch.labels), self.micro_batches)

    def backward(self, batch: Batch) -> None:
        self.engine.accumulate((batch.tokens, batch.labels), self.micro_batches)

    def timeline(self) -> list[Timed]:
        assert self.engine.pipeline is not None
        return self.engine.pipeline.timeline


_interleaved = partial(passed_bytes, vpp=2)
PIPELINE = [
    Entry("isograd 1f1b", partial(IsogradPipeline, schedule="1f1b"), passed_bytes, peers=("torch 1F1B",)),
    Entry("isograd gpipe", partial(IsogradPipeline, schedule="gpipe"), passed_bytes, peers=("torch GPipe",)),
    Entry(
        "isograd interleaved",
        partial(IsogradPipeline, schedule="1f1b", vpp=2),
        _interleaved,
        peers=("torch interleaved",),
    ),
    Entry("isograd zb", partial(IsogradPipeline, schedule="zb"), passed_bytes, peers=("torch zero-bubble",)),
    Entry(
        "isograd zb vpp2",
        partial(IsogradPipeline, schedule="zb", vpp=2),
        _interleaved,
        peers=("torch zero-bubble vpp2",),
    ),
]
