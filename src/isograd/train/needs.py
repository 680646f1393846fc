"""How much memory a run needs on each rank, by formula, before anything is started.

    states         parameters, masters, gradient sums and the optimizer's state, in the bytes that the engine keeps
    activations    what a forward keeps for its backward, times the micro-batches a pipeline has in flight
    program        Python, torch and its communication

Parameters are counted on the model itself, built without memory; activations by the tensors that isograd's Transformer
saves. For an encoder of transformers (pairs) the counts are those of a usual encoder. tests/train/test_needs.py
compares the formula with the tensors that autograd saves and with the peak of a process.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from isograd.contract import contracts
from isograd.layout import Layout
from isograd.mesh import Mesh
from isograd.models import Transformer, TransformerConfig
from isograd.nn.loss import CHUNK
from isograd.pipeline import build
from isograd.pipeline.schedule import Action
from isograd.stored import Stored
from isograd.train.config import Config
from isograd.train.job import DTYPES

PROGRAM = 300e6  # bytes of a rank before it has a model: most are torch's libraries
BUCKETS = 3 * 16 * 2**20  # gradients on their way: two buckets and what arrives of them


@dataclass(frozen=True)
class Needs:
    """Bytes that one rank needs at its peak."""

    parameters: float
    gradients: float
    optimizer: float  # its state, and master weights
    activations: float
    count: int = 0  # parameters of the whole model

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
    from isograd.train.language import model_config

    described = model_config(config.model)
    held = _held_layers(layout, described.layers, config.micro_batches)
    return [_stage(config, described, layout, index, held[index]) for index in range(layout.pp)]


def _stage(config: Config, described: TransformerConfig, layout: Layout, index: int, layers: float) -> Needs:
    mesh = Mesh.unbound(layout, layout.rank({"pp": index, "dp": 0, "cp": 0, "tp": 0}))
    model = Transformer(described, mesh, device="meta")
    table = contracts(model, mesh)
    sizes = {record.name: record.parameter.numel() for record in table}
    matrices = [r.name for r in table if r.parameter.dim() > 1 and r.name.startswith("blocks.")]
    parts: dict[str, int] = {}  # by block; what is in no block is the root
    for name, size in sizes.items():
        part = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        parts[part] = parts.get(part, 0) + size
    gathered = parts.get("", 0) + 2 * max((size for part, size in parts.items() if part), default=0)
    muon = sum(sizes[name] for name in matrices) if config.optimizer.name == "muon" else 0
    rows = sum(sizes[record.name] / mesh.size(record.contract.data) for record in table)
    states = _states(config, layout, sum(sizes.values()), rows, gathered, muon)
    whole = Transformer(described, Mesh.unbound("dp1"), device="meta")
    count = sum(parameter.numel() for parameter in whole.parameters())
    return Needs(*states, _activations(config, described, layout, index, layers), count)


def _states(
    config: Config, layout: Layout, mine: int, owned: float, gathered: int, muon: int
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients, optimizer. `mine`: elements of this rank's part, of which it owns the rows of
    `owned`. `gathered`: parameters that are whole at once at ZeRO 3."""
    narrow = DTYPES[config.model.dtype].itemsize
    wide = max(narrow, 4)
    rows = mine if layout.zero == 0 else owned
    parameters = narrow * (mine if layout.zero < 3 else rows + gathered)
    masters = wide * rows if narrow < wide else 0
    moments = wide * (2 * rows - muon * (rows / mine))
    due = wide * owned if owned < mine else 0
    whole = wide * mine  # a backward makes all of it; with more micro-batches than one it is kept
    if layout.zero > 0 and owned < mine and config.micro_batches == 1 and layout.pp == 1:
        whole = min(whole, BUCKETS + wide * gathered)  # buckets leave during backward
    return parameters, whole + due, masters + moments


def _activations(config: Config, c: TransformerConfig, layout: Layout, index: int, layers: float) -> float:
    """Bytes that forwards in flight keep, one block's gradients, and the head's logits on the last stage."""
    assert config.data is not None
    size, data = DTYPES[config.model.dtype].itemsize, config.data
    wide = max(size, 4)
    rows = math.ceil(config.batch / layout.dp / config.micro_batches)
    tokens = rows * math.ceil(data.length / layout.cp)
    block, entry = _of_a_block(c, layout, size, wide)
    masks = rows * data.length**2 * size if config.packing != "stream" and layout.ring == 1 else 0
    last = index == layout.pp - 1
    head = 3 * tokens * c.hidden * wide + 3 * min(tokens, CHUNK) * c.vocab / layout.tp * wide if last else 0
    if config.model.recompute:
        return tokens * layers * entry + 2 * (tokens * block + masks) + head
    return (layers + 1) * (tokens * block + masks) + head  # one more: the gradients of the block in backward


def _of_a_block(c: TransformerConfig, layout: Layout, size: int, wide: int) -> tuple[float, float]:
    """Bytes per token that a block of the Transformer saves, and that its input takes."""
    head = c.head_dim or c.hidden // c.heads
    inner = c.heads * head / layout.tp
    keys = max(1, (c.kv_heads or c.heads) / layout.tp) * head
    stream = c.hidden / (layout.tp if layout.sp else 1)  # the residual stream is cut over tp by sp
    kept = size * 2 * stream + size * 2 * c.hidden  # inputs of both norms; their outputs, which enter tp whole
    kept += wide * 2 * stream if c.norm == "rms" else 0  # normalised, before the weight
    kept += size * (2 * inner + 2 * keys)  # queries and result, keys and values
    inside = 4 if c.gated else 2
    dense = inside * c.mlp / layout.tp
    sparse = 0.0
    if c.experts is not None:  # each slot keeps its input, its inner features and its output
        sparse = c.experts.per_token / layout.tp * (2 * c.hidden + inside * c.experts.width)
        sparse += inside * c.experts.shared / layout.tp
    kept += size * max(dense, sparse)
    return kept, size * stream


def _held_layers(layout: Layout, layers: int, micro_batches: int) -> list[float]:
    """For each pipeline rank, the most block activations it holds at once, counted in layers."""
    if layout.pp == 1:
        return [float(layers)]
    schedule = build(layout.schedule, layout.pp, layout.vpp, min(micro_batches, 4 * layout.pp * layout.vpp))
    each = layers / schedule.stages
    return [max(1, _most_held(order)) * each for order in schedule.orders]


def _most_held(order: tuple[Action, ...]) -> int:
    """The most forwards of which a rank has not finished the backward."""
    now = most = 0
    for action in order:
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


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
    return Needs(*_states(config, layout, count, count / (layout.dp * layout.cp), count, 0), kept + vectors, count)
