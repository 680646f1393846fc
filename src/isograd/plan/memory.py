"""Bytes that a rank needs at its peak, by formula, from a Work and a Layout.

    states         parameters, masters, gradient sums and the optimizer's state, in the bytes that the engine keeps
    activations    what a forward keeps for its backward, times the micro-batches a pipeline has in flight; where ep
                   cuts experts, of a rank whose experts compute LOAD times an even share of the slots

Activations are counted by the tensors that isograd's Transformer saves. tests/train/test_resources.py compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isograd.core.layout import Layout
from isograd.models.config import TransformerConfig
from isograd.plan.work import FrameworkProfile, Work, layers_of, of_block, of_ends, params_on_rank

LOAD = 1.5  # slots that the busiest rank of an ep group computes, over an even share
CHUNK = 1024  # tokens whose logits exist at a time: nn/loss.py
TIGHT = (
    0.9  # of what a device has: more may end a run, as allocators keep gaps (PyTorch's up to 43 %: arXiv 2507.16274)
)
# Of one communicator, by NCCL's own constants: of each of 16 channels, the buffers of its three protocols at the
# receiving end of a ring (LL 512 KiB, LL128 4,800 KiB, Simple 4 MiB). Not measured; trees and more peers add to it.
COMMUNICATOR = 16 * (512 + 4800 + 4096) * 1024
BUCKETS = 3 * 16 * 2**20  # gradients on their way: two buckets and what arrives of them


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak."""

    parameters: float
    gradients: float
    optimizer: float  # its state, and master weights
    activations: float
    communication: float = 0.0  # what NCCL holds, on GPUs

    @property
    def states(self) -> float:
        """What a rank keeps for the whole run, and the gradients of a step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything at once: a bound, as activations fall while gradients grow."""
        return self.states + self.activations + self.communication


def memory(work: Work, layout: Layout, *, gpu: bool = False) -> Memory:
    """Of the rank that needs most: the first or the last pipeline stage. `gpu`: with what it needs on GPUs alone."""
    stages = []
    for index in {0, layout.pp - 1}:
        found = of_stage(replace(work, masked=work.takes_mask(gpu=True)) if gpu else work, layout, index)
        if gpu and work.profile == FrameworkProfile():  # with what NCCL holds, of isograd
            held = communicators(work, layout, index) * COMMUNICATOR
            gradients = found.gradients + waiting_buckets(work, layout, index)
            found = replace(found, gradients=gradients, communication=held)
        stages.append(found)
    return max(stages, key=lambda stage: stage.total)


def waiting_buckets(work: Work, layout: Layout, index: int) -> float:
    """Bytes of packed gradients that `of_stage` takes for sent. On GPUs the host runs ahead of the device: the reducer
    asks NCCL whether a bucket has arrived, is told no, and keeps its flat memory up to the step. So where buckets leave
    during backward (ZeRO 1 and 2, one micro-batch or `sharded`, no pipeline), all gradients of the rank are in memory
    at its end. At ZeRO 3 the next block waits for the one before, and elsewhere gradients are kept whole anyway."""
    mine, data = params_on_rank(work, layout, index), layout.dp * layout.cp
    if layout.zero not in (1, 2) or data == 1 or work.keeps_whole or layout.pp > 1:
        return 0.0
    _, gathered = _whole_at_once(work, layout, index)
    return max(0.0, work.sum_bytes * (mine.all - gathered) - BUCKETS)


def communicators(work: Work, layout: Layout, index: int) -> int:
    """How many communicators of NCCL a rank of this pipeline index has: one for each set of members and purpose."""
    world, data, tp, pp = layout.world_size, layout.dp * layout.cp, layout.tp, layout.pp
    ring, ulysses, heads = layout.ring, layout.ulysses, work.model.kv_heads or work.model.heads
    if world == 1:
        return 0
    found = 2 + (data > 1) + (1 < data < world) + (1 < tp < world)  # the world twice: layers, and the end of a step
    found += (tp > heads > 1) + (layout.cp > 1 and layout.dp > 1) + (1 < ulysses < layout.cp) + (1 < ring < layout.cp)
    if pp > 1:  # up and down, to each neighbour
        links = 1 if pp == 2 or (layout.vpp == 1 and index in (0, pp - 1)) else 2
        found += 2 * links + (pp < world) + (work.model.tied and pp > 2 and index in (0, pp - 1))
    if layout.ep > 1:
        found += (layout.ep < world) + (layout.edp > 1) * (1 + (layout.edp < world))
    return found


def of_stage(work: Work, layout: Layout, index: int) -> Memory:
    """Of the ranks of one pipeline index."""
    mine, data = params_on_rank(work, layout, index), layout.dp * layout.cp
    owned = mine.dense / data + mine.routed / layout.edp
    largest, gathered = _whole_at_once(work, layout, index)
    muon = mine.matrices if work.muon else 0
    sizes = (mine.all, owned, gathered, muon)
    parameters, gradients, optimizer = states(layout, work.size, *sizes, whole=work.keeps_whole, ema=work.ema)
    if work.profile != FrameworkProfile():  # another program's sums of gradients
        whole = layout.zero == 3 and layout.pp > 1 and work.profile.whole_in_pipeline
        rows = mine.all if whole or work.profile.keeps_gradients else owned + largest
        gradients = (work.profile.kept_bytes or work.profile.gradient_bytes) * rows
        gradients += work.sum_bytes * owned if work.profile.fp32_rows else 0
        vocab = work.model.vocab if index in (0, layout.pp - 1) else 0
        tensor = max(vocab, work.model.mlp) * work.model.hidden / layout.tp  # the largest parameter
        gradients += work.sum_bytes * tensor if work.profile.widened else 0
        parameters = work.size * (mine.all + owned) if whole else parameters
    return Memory(parameters, gradients, optimizer, activations(work, layout, index))


def _whole_at_once(work: Work, layout: Layout, index: int) -> tuple[float, float]:
    """Elements of the largest block, and what is gathered at a time at ZeRO 3: ends, a block and the next one."""
    sparse = set(map(work.model.has_experts, range(work.model.layers)))
    largest = max(of_block(work, layout, kind).all for kind in sparse)
    return largest, of_ends(work, layout, index == 0, index == layout.pp - 1).all + 2 * largest


def states(
    layout: Layout,
    narrow: int,
    mine: float,
    owned: float,
    gathered: float,
    muon: float,
    *,
    whole: bool,
    ema: bool = False,
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients, optimizer. `narrow`: bytes of an element of a parameter. `mine`: elements of this
    rank's part, of which it owns the rows of `owned`. `gathered`: parameters that are whole at once at ZeRO 3. `muon`:
    elements of matrices that Muon steps, which has one moment. `whole`: whole gradients are kept between
    micro-batches. `ema`: averages of the weights are kept."""
    wide = max(narrow, 4)
    rows = mine if layout.zero == 0 else owned
    parameters = narrow * (mine if layout.zero < 3 else rows * (narrow >= wide) + gathered)  # cast as they are gathered
    masters = wide * rows * ((narrow < wide) + ema)
    moments = wide * (2 * rows - muon * (rows / mine))
    due = wide * owned if owned < mine else 0
    made = wide * mine  # by a backward
    if layout.zero > 0 and owned < mine and not whole and layout.pp == 1:
        made = min(made, BUCKETS + wide * gathered)  # buckets leave during backward
    return parameters, made + due, masters + moments


def activations(work: Work, layout: Layout, index: int) -> float:
    """Bytes that forwards in flight keep, one block's gradients, and the head's logits on the last stage."""
    c, tokens = work.model, work.tokens(layout)
    rows = tokens / -(-work.length // layout.cp)
    dense, sparse, entry = of_a_block(work, layout)
    kept = products_of_a_block(work, layout) if work.keeps_products else (entry, entry)
    plain, having = (sum(kind) for kind in zip(*layers_of(work, layout, index), strict=True))
    if work.runs_again:  # one block at a time
        block = max(dense if plain else 0.0, sparse if having else 0.0)
    else:
        block = (plain * dense + having * sparse) / max(1, plain + having)
    block *= work.profile.saved
    if not work.profile.fused_attention:  # scores, probabilities and the mask of their dropout
        block += (2 * work.size + 1) * c.heads * work.length / layout.tp
    if work.recompute == "selective":  # of another program
        block *= 1 - work.profile.selective
    logits = 3.0 * min(tokens, CHUNK) * work.sum_bytes  # with their probabilities and gradients
    if not work.profile.chunks_logits:
        logits = float(tokens * (work.size + work.sum_bytes))  # of all tokens, and wide once, in place
    masks = rows * work.length**2 * work.size if work.masked and layout.ring == 1 else 0.0
    last = index == layout.pp - 1
    head = 3 * tokens * c.hidden * work.sum_bytes + logits * c.vocab / layout.tp if last else 0
    layers = held_layers(work, layout, index)
    if not last or layout.vpp > 1:  # what a stage passes on stays until its gradient is back
        head += tokens * entry * max(1, most_in_flight(layout, work.micro_batches, index))
    if work.runs_again:
        mean = (plain * kept[0] + having * kept[1]) / max(1, plain + having)
        return float(tokens * layers * mean + 2 * (tokens * (block - mean + entry) + masks) + head)
    return (layers + 1) * (tokens * block + masks) + head  # one more: the gradients of the block in backward


def of_a_block(work: Work, layout: Layout) -> tuple[float, float, float]:
    """Bytes per token that a block of the Transformer saves, without experts and with, and that its input takes."""
    c, size, wide = work.model, work.size, work.sum_bytes
    inner = c.heads * work.head_dim / layout.tp
    keys = max(1, (c.kv_heads or c.heads) / layout.tp) * work.head_dim
    stream = c.hidden / (layout.tp if layout.sp else 1)  # the residual stream is cut over tp by sp
    kept = size * 2 * stream + size * 2 * c.hidden  # inputs of both norms; their outputs, which enter tp whole
    # RMSNorm keeps what it has normalised, before the weight. LayerNorm keeps its input in fp32 at least, on CPUs.
    kept += (wide if c.norm == "rms" else wide - size) * 2 * stream
    kept += size * (2 * inner + 2 * keys)  # queries and result, keys and values
    inside = 4 if c.gated else 2
    dense = kept + size * inside * c.mlp / layout.tp
    sparse = kept + _of_experts(c, inside, work, layout)
    return dense, sparse, size * stream


def products_of_a_block(work: Work, layout: Layout) -> tuple[float, float]:
    """Bytes per token that a block keeps with recompute "selective", without experts and with: its input, and the
    results of its matrix products and of attention. Experts run again; their router's scores are kept."""
    c, size, tp = work.model, work.size, layout.tp
    inner, keys = c.heads * work.head_dim / tp, max(1, (c.kv_heads or c.heads) / tp) * work.head_dim
    stream = c.hidden / (tp if layout.sp else 1)
    attended = size * (inner + 2 * keys + c.hidden) + (layout.ring == 1) * (
        size * inner + work.sum_bytes * c.heads / tp
    )
    widths = work.matrices - 1
    dense = size * stream + attended + size * (widths * c.mlp / tp + c.hidden)
    shared = c.experts.shared if c.experts is not None else 0
    routed = work.sum_bytes * c.experts.number / tp if c.experts is not None else 0.0
    return dense, size * stream + attended + routed + size * (widths * shared / tp + (c.hidden if shared else 0))


def _of_experts(model: TransformerConfig, inside: int, work: Work, layout: Layout) -> float:
    """Bytes per token that a layer of experts saves. Slots are computed by the rank that has their expert, and come
    back; the rest is kept where the token is routed, on one of its tp ranks."""
    c, size, wide = model.experts, work.size, work.sum_bytes
    if c is None:
        return 0.0
    load = min(LOAD, layout.ep, c.number / c.per_token)
    places = 8 * (2 if layout.ep == 1 else 4)  # where a slot comes from and goes to
    slot = size * (load * (model.hidden + inside * c.width) + model.hidden) + places
    scored = wide * c.number * (1 + (c.balance == "sequence") + (c.z_weight > 0 and size < wide))
    return (c.per_token * slot + scored) / layout.tp + size * inside * c.shared / layout.tp


def held_layers(work: Work, layout: Layout, index: int) -> float:
    """The most block activations that a pipeline rank holds at once, counted in layers."""
    own = [sum(stage) for stage in layers_of(work, layout, index)]
    if layout.pp == 1:
        return float(sum(own))
    return max(1, most_in_flight(layout, work.micro_batches, index)) * work.model.layers / (layout.pp * layout.vpp)


def most_in_flight(layout: Layout, micro_batches: int, index: int) -> int:
    """The forwards of which a rank has not finished the backward, at most: pipeline/schedule.py, without its order."""
    ahead = layout.pp - index
    if layout.schedule == "zb":
        ahead, index = layout.pp, 0
    if layout.vpp > 1:
        ahead = (layout.pp - index - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    every = micro_batches * layout.vpp
    forwards_first = layout.schedule == "gpipe" and (layout.vpp > 1 or index < layout.pp - 1)
    return every if forwards_first else min(every, ahead)
