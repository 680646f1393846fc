"""How much memory a run needs on each rank, by formula, before anything is started.

    states         parameters, masters, gradient sums and the optimizer's state, in the bytes that the engine keeps
    activations    what a forward keeps for its backward, times the micro-batches a pipeline has in flight
    program        Python, torch and its communication

Parameters are counted on the model itself, built without memory; plan/memory.py has the formulas. For a model that
transformers' code runs, activations are those of a usual encoder or decoder. tests/train/test_needs.py compares the
formula with the tensors that autograd saves and with the peak of a process.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from isograd.contract import contracts
from isograd.layout import Layout
from isograd.mesh import Mesh
from isograd.models import Transformer
from isograd.plan.memory import activations, states
from isograd.plan.work import Work
from isograd.stored import Stored
from isograd.train.config import Config
from isograd.train.job import DTYPES

PROGRAM = 300e6  # bytes of a rank before it has a model: most are torch's libraries


@dataclass(frozen=True)
class Needs:
    """Bytes that one rank needs at its peak."""

    parameters: float
    gradients: float
    optimizer: float  # its state, and master weights
    activations: float
    count: int = 0  # parameters of the whole model
    frozen: int = 0  # of those, that are not trained

    @property
    def trained(self) -> int:
        """Parameters of the whole model that are trained."""
        return self.count - self.frozen

    @property
    def states(self) -> float:
        """What a rank keeps for the whole run, and the gradients of a step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything at once: a bound, as activations fall while gradients grow."""
        return self.states + self.activations + PROGRAM


def needs(config: Config) -> list[Needs]:
    """What a rank of each pipeline stage needs; ranks that differ in another index need the same or less."""
    layout = Layout.parse(config.layout)
    if config.pairs is not None:
        return [_encoder(config, layout)]
    if config.by_transformers:
        return [_library(config, layout)] * layout.pp
    work = work_of(config)
    return [_stage(work, layout, index) for index in range(layout.pp)]


def work_of(config: Config) -> Work:
    """What a step of a language model's run computes, as plan/ counts it."""
    from isograd.train.language import model_config

    assert config.data is not None
    return Work(
        model=model_config(config),
        length=config.data.length,
        batch=config.batch * (2 if config.task == "preference" else 1),  # rows: answers
        micro_batches=config.micro_batches,
        dtype=config.model.dtype,
        recompute="full" if config.model.recompute else "none",
        masked=config.packing != "stream",
        muon=config.optimizer.name == "muon",
    )


def _stage(work: Work, layout: Layout, index: int) -> Needs:
    mesh = Mesh.unbound(layout, layout.rank({"pp": index, "dp": 0, "cp": 0, "tp": 0}))
    model = Transformer(work.model, mesh, device="meta")
    table = contracts(model, mesh)
    sizes = {record.name: record.parameter.numel() for record in table}
    matrices = [r.name for r in table if r.parameter.dim() > 1 and r.name.startswith("blocks.")]
    parts: dict[str, int] = {}  # by block; what is in no block is the root
    for name, size in sizes.items():
        part = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        parts[part] = parts.get(part, 0) + size
    gathered = parts.get("", 0) + 2 * max((size for part, size in parts.items() if part), default=0)
    muon = sum(sizes[name] for name in matrices) if work.muon else 0
    rows = sum(sizes[record.name] / mesh.size(record.contract.data) for record in table)
    kept = states(layout, work.size, work.micro_batches, sum(sizes.values()), rows, gathered, muon)
    whole = Transformer(work.model, Mesh.unbound("dp1"), device="meta")
    count = sum(parameter.numel() for parameter in whole.parameters())
    return Needs(*kept, activations(work, layout, index), count)


def _library(config: Config, layout: Layout) -> Needs:
    """A model of transformers: parameters counted on its class, activations as usual decoders have."""
    from isograd.train.library import counted

    assert config.data is not None
    found = counted(config)
    size, owners = DTYPES[config.model.dtype].itemsize, layout.dp * layout.cp
    cut, blocks = layout.tp * layout.pp, max(1, found.layers)
    trained, frozen = found.trained / cut, (found.parameters - found.trained) / cut
    gathered = 3 * trained / blocks  # a block, the next one, and what is in no block
    kept = states(layout, size, config.micro_batches, trained, trained / owners, gathered, 0)
    held = frozen / owners + 3 * frozen / blocks if layout.zero == 3 else frozen
    rows = -(-config.batch // layout.dp) * (2 if config.task == "preference" else 1)
    flight = min(layout.pp, config.micro_batches)
    tokens = -(-rows // config.micro_batches) * config.data.length / layout.cp
    blocks_here = 2 if config.model.recompute else found.layers / layout.pp + 1
    block = tokens * (12 * found.hidden + 3 * found.mlp) * size / layout.tp
    logits = tokens * found.vocab * (size + 8) / (1 if config.task == "preference" else layout.tp)
    saved = flight * blocks_here * block + logits
    return Needs(kept[0] + held * size, kept[1], kept[2], saved, found.parameters, found.parameters - found.trained)


def _encoder(config: Config, layout: Layout) -> Needs:
    """An encoder of transformers: parameters counted in its file, activations of a chunk as usual encoders have."""
    assert config.pairs is not None
    path = Path(config.model.path or "")
    count = sum(math.prod(shape) for shape in Stored(path).shapes.values())
    described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    hidden = int(described.get("hidden_size") or described.get("dim") or 0)
    layers = int(described.get("num_hidden_layers") or described.get("n_layers") or 0)
    mlp = int(described.get("intermediate_size") or described.get("hidden_dim") or 4 * hidden)
    size = DTYPES[config.model.dtype].itemsize
    tokens = min(config.pairs.chunk, math.ceil(config.batch / layout.dp)) * config.pairs.length
    kept = tokens * (layers + 1) * (12 * hidden + 2 * mlp) * size
    vectors = 6 * config.batch * hidden * 4  # representations of both towers, their gradients, a tile of scores
    states_of = states(layout, size, config.micro_batches, count, count / (layout.dp * layout.cp), count, 0)
    return Needs(*states_of, kept + vectors, count)
