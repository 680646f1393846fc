"""Models of transformers, their classes as they are, under every layout that their own tensor plan allows.

model = ig.hugging.load("folder", mesh)                   # or a config: random weights, equal under every layout
engine = ig.Engine(model, mesh, ...)
part = ig.hugging.shard(batch, mesh)
engine.backward(model(**part.inputs).loss, weight=part.weight)
"""

from isograd.hugging.loading import load
from isograd.hugging.losses import shard
from isograd.hugging.proof import Proof, prove
from isograd.sequence.hugging import Part

__all__ = ["Part", "Proof", "load", "prove", "shard"]
