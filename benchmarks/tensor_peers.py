"""The tensor-parallel peer: torch's DTensor, with parallelize_module, as its tutorial and torchtitan use it.

Column-parallel q, k, v, gate, up and head, row-parallel out, down and embedding, and the loss on vocabulary shards
(loss_parallel). With SequenceParallel, norms and the residual stream are cut along the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.contestant import Contestant, Entry, adamw
from benchmarks.model import Decoder
from benchmarks.task import Batch, Sizes


class DTensorTP(Contestant):
    def __init__(self, sizes: Sizes, rank: int, world: int, *, sequence: bool) -> None:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        self.model = Decoder(sizes)
        parallelize_module(self.model, mesh, _outer(sequence))
        for block in self.model.blocks:
            parallelize_module(block, mesh, _inner(sequence))
        # The fused optimizer takes no mixture of DTensors and plain tensors (norms, without SequenceParallel).
        cut = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        plain = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        self.optimizer = adamw([{"params": group} for group in (cut, plain) if group])

    def backward(self, batch: Batch) -> None:
        with loss_parallel():
            self.model(batch.tokens, batch.labels).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            yield name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _outer(sequence: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    return styles | ({"norm": SequenceParallel()} if sequence else {})


def _inner(sequence: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence else Replicate()
    # One conversion for all projections of an input: their gradients are added before they are reduced, once.
    styles: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "attention.out": RowwiseParallel(output_layouts=stream),
        "mlp.down": RowwiseParallel(output_layouts=stream),
    }
    styles |= {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    styles |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    return styles | ({"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sequence else {})


def stream_bytes(sizes: Sizes, world: int) -> float:
    """The stream is summed over ranks after embedding, attention and MLP; its gradient before attention, MLP and head.

    Each sum moves 2 (W - 1) / W of the stream, as an all-reduce, or as a reduce-scatter and a gather (with SP).
    """
    sums = 2 + 4 * sizes.layers
    return sums * 2 * (world - 1) / world * sizes.batch * sizes.seq * sizes.hidden * 4


PEERS = [
    Entry("DTensor TP", partial(DTensorTP, sequence=False), stream_bytes),
    Entry("DTensor TP + SP", partial(DTensorTP, sequence=True), stream_bytes),
]
