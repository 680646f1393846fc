"""isograd's Transformer with experts as a contestant."""

from __future__ import annotations

from functools import partial

import isograd as ig
from benchmarks.contestant import Entry
from benchmarks.expert_peers import PEERS
from benchmarks.expert_task import ExpertSizes, adamw, gather_twice, reduce_and_gather, stream_and_slots
from benchmarks.ours import Isograd
from benchmarks.task import Batch
from isograd.hf.configs import load_config
from isograd.hf.families import HuggingFace


class IsogradExperts(Isograd):
    """Reads its part of the same file. `layout`: with W for the number of ranks."""

    def __init__(self, sizes: ExpertSizes, rank: int, world: int, *, layout: str) -> None:
        self.mesh = ig.Mesh(layout.replace("W", str(world)))
        config = load_config(sizes.folder)
        self.model = ig.models.Transformer(config, self.mesh)
        self.engine = ig.Engine(self.model, self.mesh, adamw, weights=HuggingFace(sizes.folder, config))

    def backward(self, batch: Batch) -> None:
        mine = batch.share(self.mesh.index("dp"), self.mesh.size("dp"))
        loss, count = self.model(mine.tokens, mine.labels)
        self.engine.backward(loss, weight=count)


EXPERTS = [
    Entry(
        "isograd dp ep zero1",
        partial(IsogradExperts, layout="dpW epW zero1"),
        reduce_and_gather,
        peers=(PEERS[0].name,),
    ),
    Entry("isograd dp ep zero3", partial(IsogradExperts, layout="dpW epW zero3"), gather_twice, peers=(PEERS[0].name,)),
    Entry("isograd tp ep", partial(IsogradExperts, layout="tpW epW"), stream_and_slots, peers=(PEERS[1].name,)),
]
