"""The peer for long sequences, DeepSpeed's Ulysses, and the bytes that each method cannot avoid to send.

The plain model keeps its code. Each rank is given its part of the tokens and of the rotary angles, and attention runs
inside DeepSpeed's DistributedAttention: an all-to-all each for queries, keys, values and the output. Gradients are
averaged by DDP, which makes a mean of the ranks' means: exact while all ranks have equally many labels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestant import Contestant, Entry, adamw
from benchmarks.data_peers import HAS_DEEPSPEED, reduce_and_gather
from benchmarks.model import Attention, Decoder, turn
from benchmarks.task import Batch, Sizes


class UlyssesAttention(Attention):
    def __init__(self, sizes: Sizes) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__(sizes)
        self.around = DistributedAttention(_whole, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))  # [b, s / W, heads, d]
        q, k = (turn(t, cos[:, None], sin[:, None]) for t in (q, k))
        return self.out(self.around(q, k, v, 0).flatten(-2))


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whole sequences of some heads, [b, s, heads / W, d]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


class DeepSpeedUlysses(Contestant):
    def __init__(self, sizes: Sizes, rank: int, world: int) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        model = Decoder(sizes)
        for block in model.blocks:
            plain, block.attention = block.attention, UlyssesAttention(sizes)
            block.attention.load_state_dict(plain.state_dict())
        self.rank, self.world = rank, world
        cos, sin = self._mine(model.cos, 0), self._mine(model.sin, 0)
        del model.cos, model.sin  # as buffers, DDP would give every rank the first one's
        model.cos, model.sin = cos, sin
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = adamw(self.model.parameters())

    def _mine(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.world, dim)[self.rank].contiguous()

    def backward(self, batch: Batch) -> None:
        self.model(self._mine(batch.tokens, 1), self._mine(batch.labels, 1)).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.module.named_parameters():
            yield name, parameter.grad

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def ulysses_bytes(sizes: Sizes, world: int) -> float:
    """q, k, v there and the output back, in forward and again in backward: of each a rank keeps 1 / W."""
    mine = sizes.batch * sizes.seq / world * sizes.hidden * 4
    return reduce_and_gather(sizes, world) + sizes.layers * 2 * 4 * mine * (world - 1) / world


def ring_bytes(sizes: Sizes, world: int) -> float:
    """Of the last member of a zig-zag ring, which sends most; the first sends 2 (W - 1) blocks each of k and v.

    All members before it see its whole block, in forward and again in backward; it sees half of each of theirs, and
    sends gradients for these halves home.
    """
    block = sizes.batch * sizes.seq / world * sizes.hidden * 4
    return reduce_and_gather(sizes, world) + sizes.layers * 2 * block * (2 * (world - 1) + (world - 1) / 2)


PEERS = [Entry("DeepSpeed Ulysses", DeepSpeedUlysses, ulysses_bytes)]
HERE = PEERS if HAS_DEEPSPEED else []
