"""What one step is to do: a model, a batch and how they are computed; and how many parameters a rank holds of it.

Everything here and in comm_volume.py, costs.py and memory.py is arithmetic on sizes: a layout is judged in well under a
millisecond, so that a search can try thousands. tests/plan/test_comm_volume.py compares it with contracts and with the
records of simulated ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from isograd.core.layout import Layout
from isograd.models.config import TransformerConfig, split_by_cost

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}  # bytes of an element


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """How a program computes. The defaults are isograd's own; published runs are of programs with others."""

    fused_attention: bool = True  # scores are never in memory
    attention: float = 1.0  # its rate, over that of the machine's description
    fused_sums: bool = False  # products of gradients add to the sums themselves
    passes: float = 2.0  # how often operations on elements read and write what they have to, at the least, once
    gradient_bytes: int = 4  # of an element that is reduced
    hides_gradients: float = 0.8  # the share of a backward that can hide the reduction of gradients
    hides_parameters: float = 0.0  # the share of a forward that can hide the gather of updated parameters
    hides_shards: float = 0.8  # at ZeRO 3: the share of a block's time that can hide the gather of the next block
    hides_tp: float = 0.0  # the share of the messages of tensor parallelism that products hide
    waits_for_sends: bool = False  # a pipeline rank computes nothing while it sends
    even_layers: bool = False  # stages have as many layers as each other, whatever embedding and head cost
    ends_as_layers: bool = False  # embedding and head count as a layer each, where that comes out even
    keeps_gradients: bool = True  # whole gradients stay between micro-batches; False: each owner's rows alone
    saved: float = 1.0  # of what isograd's blocks keep for backward; fused operators keep less
    kept_bytes: int | None = None  # of an element of the gradients that stay; None: gradient_bytes
    selective: float = 0.0  # the share of the products that "selective" runs again
    chunks_logits: bool = True  # logits of a part of the tokens exist at a time
    whole_in_pipeline: bool = False  # at ZeRO 3 with a pipeline, parameters and gradients are whole during a step
    fp32_rows: bool = False  # a step makes an fp32 copy of this rank's rows of the gradients
    widened: bool = False  # a gradient is widened as a whole before it is added to its sum


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step of a language model."""

    model: TransformerConfig
    length: int  # tokens of a sequence
    batch: int  # sequences of a step, over all ranks
    micro_batches: int
    dtype: str = "bf16"  # of parameters and activations
    products: str | None = None  # dtype of matrix products; None: dtype
    recompute: str = "none"  # "none", "selective" (isograd: all but products and attention) or "full"
    masked: bool = False  # packed documents
    muon: bool = False
    accumulate: str = "local"  # "sharded": gradients leave with each micro-batch
    ema: bool = False  # an average of the weights beside the masters
    profile: FrameworkProfile = FrameworkProfile()

    @property
    def keeps_products(self) -> bool:
        """Whether blocks run again but for products and attention, as isograd's do; other programs choose otherwise."""
        return self.recompute == "selective" and self.profile == FrameworkProfile()

    @property
    def runs_again(self) -> bool:
        """Whether a backward begins with the forward of its block, messages included."""
        return self.recompute == "full" or self.keeps_products

    @property
    def reductions(self) -> int:
        """How often gradients leave in a step."""
        return self.micro_batches if self.accumulate == "sharded" else 1

    @property
    def keeps_whole(self) -> bool:
        """Whether whole gradients are kept between micro-batches."""
        return self.micro_batches > self.reductions

    @property
    def size(self) -> int:
        """Bytes of an activation."""
        return SIZES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        """Bytes of a gradient sum, and of a master weight."""
        return max(4, self.size)

    def takes_mask(self, gpu: bool) -> bool:
        """Whether attention takes a mask of documents, a whole matrix: not in 16 bits on GPUs (varlen_attn)."""
        return self.masked and not (gpu and self.size == 2)

    def tokens(self, layout: Layout) -> int:
        """Of one micro-batch on one rank, before tensor parallelism cuts them."""
        rows = -(-self.batch // layout.dp // self.micro_batches)
        return rows * -(-self.length // layout.cp)

    @cached_property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.model.features_per_head

    @cached_property
    def matrices(self) -> int:
        """How many matrices a feed-forward layer has."""
        return 3 if self.model.gated else 2

    @cached_property
    def flops(self) -> float:
        """What MFU counts of a step, in PaLM's convention, as `isograd train` does: products of the parameters that a
        token uses, and attention of all tokens to all; forward and backward, nothing twice."""
        c, d = self.model, self.head_dim
        each = 0.0
        for layer in range(c.layers):
            if c.experts is not None and c.has_experts(layer):
                each += 2 * c.hidden * c.experts.number  # the router
            each += 2 * c.hidden * d * (2 * c.heads + 2 * (c.kv_heads or c.heads))
            each += 2 * self.matrices * c.hidden * c.width_per_token(layer) + 4 * c.heads * d * self.length
        return 3 * (each + 2 * c.hidden * c.vocab) * self.batch * self.length

    def split(self, layout: Layout) -> tuple[int, ...]:
        """How many layers each stage has, as the Transformer cuts itself."""
        stages = layout.pp * layout.vpp
        each, rest = divmod(self.model.layers + 2, stages)
        if self.profile.ends_as_layers and stages > 1 and each > 1 and not rest:
            return (each - 1, *[each] * (stages - 2), each - 1)
        return split_by_cost(self.model, stages, layout.pp, self.profile.even_layers)


class ParamsOnRank(NamedTuple):
    """Elements of the parameters that a rank holds of something, by the ranks that hold copies."""

    dense: float = 0.0  # copies on the ranks of dp x cp
    routed: float = 0.0  # experts: copies on the ranks of edp
    shared: float = 0.0  # of `dense`: replicas over tp, each with a part of the gradient
    pairs: float = 0.0  # of `dense`: key and value heads that several tp ranks hold
    matrices: float = 0.0  # of all: what Muon would step

    @property
    def all(self) -> float:
        """Elements."""
        return self.dense + self.routed


def of_block(work: Work, layout: Layout, sparse: bool) -> ParamsOnRank:
    """The parameters of one block on one rank."""
    return _of_block(work.model, layout.tp, layout.sp, layout.ep, sparse)


@lru_cache(maxsize=4096)
def _of_block(c: TransformerConfig, tp: int, sp: bool, ep: int, sparse: bool) -> ParamsOnRank:
    d, matrices = c.features_per_head, 3 if c.gated else 2
    heads, kv = c.heads / tp, max(1, (c.kv_heads or c.heads) / tp)
    norms = 2 * c.hidden * (1 if c.norm == "rms" else 2)
    keys = 2 * c.hidden * kv * d + (2 * kv * d if c.qkv_bias else 0)
    attention = 2 * c.hidden * heads * d + keys + (heads * d if c.qkv_bias else 0)
    over_heads = 2.0 * d if c.qk_norm else 0.0
    replicas = float(norms + (c.hidden if c.out_bias else 0))
    routed = router = 0.0
    inner = float(c.mlp)
    biases = (inner / tp * (matrices - 1), float(c.hidden)) if c.mlp_bias else (0.0, 0.0)
    if sparse and c.experts is not None:
        routed = c.experts.number / ep * matrices * c.hidden * c.experts.width
        router = c.hidden * c.experts.number + (c.hidden if c.experts.shared_gate else 0)
        inner, biases = float(c.experts.shared), (0.0, 0.0)
    replicas += biases[1]
    feed = matrices * c.hidden * inner / tp
    dense = attention + feed + biases[0] + replicas + over_heads + router
    owed = (replicas if sp else 0) + over_heads + router
    copies = keys if tp > (c.kv_heads or c.heads) else 0
    return ParamsOnRank(dense, routed, owed if tp > 1 else 0, copies, attention + feed + router + routed)


def of_ends(work: Work, layout: Layout, first: bool, last: bool) -> ParamsOnRank:
    """Embedding and head, with the last norm, where a rank has them."""
    c = work.model
    found: float = 0
    table = -(-c.vocab // layout.tp) * c.hidden
    shared: float = 0
    if first or (last and c.tied):
        found += table
    if first and c.positions == "learned":
        found += c.max_positions * c.hidden
        shared += c.max_positions * c.hidden
    if last:
        norm = c.hidden * (1 if c.norm == "rms" else 2)
        found, shared = found + norm + (0 if c.tied else table), shared + norm
    return ParamsOnRank(dense=found, shared=shared if layout.sp else 0)


class BlockKind(NamedTuple):
    """What blocks differ in that cost differently."""

    sparse: bool = False  # with experts
    window: int | None = None  # tokens that each sees, where they are fewer than a sequence has


def kinds_of(work: Work, layout: Layout, index: int) -> tuple[tuple[tuple[BlockKind, int], ...], ...]:
    """For each stage of a pipeline rank: how many of its layers are of which kind."""
    windows = work.model.sliding_window is not None and work.model.sliding_window < work.length
    return _kinds_of(work.model, work.split(layout), layout.pp, index, windows)


@lru_cache(maxsize=4096)
def _kinds_of(
    c: TransformerConfig, split: tuple[int, ...], pp: int, index: int, windows: bool
) -> tuple[tuple[tuple[BlockKind, int], ...], ...]:
    found = []
    for stage in range(index, len(split), pp):
        start = sum(split[:stage])
        here = range(start, start + split[stage])
        counts = Counter(BlockKind(c.has_experts(n), c.window_of(n) if windows else None) for n in here)
        found.append(tuple(counts.items()))
    return tuple(found)


def layers_of(work: Work, layout: Layout, index: int) -> tuple[tuple[int, int], ...]:
    """For each stage of a pipeline rank: how many of its layers have no experts, and how many have."""
    stages = kinds_of(work, layout, index)
    both = [[sum(n for kind, n in stage if kind.sparse is sparse) for sparse in (False, True)] for stage in stages]
    return tuple((plain, having) for plain, having in both)


def params_on_rank(work: Work, layout: Layout, index: int) -> ParamsOnRank:
    """The parameters of a rank of this pipeline index (tp index 0, which has the largest part of the vocabulary)."""
    plain, sparse = of_block(work, layout, False), of_block(work, layout, True)
    ends = of_ends(work, layout, index == 0, index == layout.pp - 1)
    stages = layers_of(work, layout, index)
    without, having = sum(stage[0] for stage in stages), sum(stage[1] for stage in stages)
    return ParamsOnRank(*(e + without * p + having * s for e, p, s in zip(ends, plain, sparse, strict=True)))
