"""Loops that users of other libraries have, each under the library's own parallelism and under isograd's integration.

    python -m benchmarks.integrations                   # 2 ranks, a Llama of 20 M parameters, about two minutes
    python -m benchmarks.integrations --only "*tp" --rounds 9

The same loop of accelerate (prepare, backward, step, zero_grad), the same stored Llama, the same layout: accelerate's
FSDP2 against zero3 on two data ranks, transformers' own tp against tp, DeepSpeed's Ulysses under DDP against cp. An "own
loop" has `ig.Engine` and no library around it: the lines below the table are what an integration costs over it, and
over the peer. accelerate turns FSDP on for GPUs alone, so that here its state is told what it would have set there.
The columns are those of benchmarks.data_parallel.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import isograd as ig
from benchmarks import report
from benchmarks.contestant import Contestant, Entry, adamw, nothing
from benchmarks.data_peers import gather_twice
from benchmarks.hugging import StoredSizes, Theirs, called, store
from benchmarks.ours import Isograd
from benchmarks.sequence_peers import ulysses_bytes
from benchmarks.task import IGNORE, Batch
from benchmarks.tensor_peers import stream_bytes


def given(batch: Batch) -> dict[str, Any]:
    """As a model of transformers takes it, which shifts labels by itself."""
    return {"input_ids": batch.tokens, "labels": F.pad(batch.labels[:, :-1], (1, 0), value=IGNORE)}


class Whole(Theirs):
    """transformers' model on the whole batch, in one process or cut by its own tp."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, cut: bool = False) -> None:
        super().__init__(sizes, rank, world, cut=cut)
        self.model.config.use_cache = False

    def backward(self, batch: Batch) -> None:
        self.model(**given(batch)).loss.backward()


class OwnLoop(Isograd):
    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, layout: str) -> None:
        self.mesh = ig.Mesh(layout.replace("W", str(world)))
        self.model = ig.hf.load(sizes.folder, self.mesh, prove=False, dtype=torch.float32)
        self.model.config.use_cache = False
        self.engine = ig.Engine(self.model, self.mesh, adamw)

    def backward(self, batch: Batch) -> None:
        mine = ig.hf.shard(given(batch.share(self.mesh.index("dp"), self.mesh.size("dp"))), self.mesh)
        self.engine.backward(self.model(**mine.inputs).loss, weight=mine.weight)

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((called(name), gradient) for name, gradient in self.engine.grads().items())


class Loop(Contestant):
    """accelerate's loop; a rank is given its rows, as a prepared loader does."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, layout: str | None) -> None:
        """layout: of isograd; None: accelerate's FSDP2."""
        import accelerate
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from transformers import AutoModelForCausalLM

        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 1}
        os.environ |= {name: str(value) for name, value in told.items()}  # the world is there already
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        model = AutoModelForCausalLM.from_pretrained(sizes.folder, dtype=torch.float32).train()
        model.config.use_cache = False
        if layout is None:
            from accelerate.utils import FullyShardedDataParallelPlugin

            self.accelerator = accelerate.Accelerator(cpu=True)
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
            )  # fmt: skip
            state = self.accelerator.state
            state.distributed_type, state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
            self.place = rank, world
        else:
            self.accelerator = ig.integrations.Accelerator(cpu=True, layout=layout.replace("W", str(world)))
            mesh = self.accelerator._mesh
            self.place = mesh.index("dp"), mesh.size("dp")
        self.model, self.optimizer = self.accelerator.prepare(model, adamw(model.parameters()))

    def backward(self, batch: Batch) -> None:
        self.accelerator.backward(self.model(**given(batch.share(*self.place))).loss)

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self.accelerator, ig.integrations.Accelerator):
            yield from ((called(name), gradient) for name, gradient in self.accelerator.engine.grads().items())
            return
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            yield called(name), parameter.grad.full_tensor()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


ONE = Entry("one process", Whole, nothing, alone=True)
ENTRIES = [
    Entry("accelerate FSDP2", partial(Loop, layout=None), gather_twice),
    Entry("own loop zero3", partial(OwnLoop, layout="dpW zero3"), gather_twice),
    Entry("isograd accelerate zero3", partial(Loop, layout="dpW zero3"), gather_twice, peers=("accelerate FSDP2",)),
    Entry("transformers tp", partial(Whole, cut=True), stream_bytes),
    Entry("own loop tp", partial(OwnLoop, layout="tpW"), stream_bytes),
    Entry("isograd accelerate tp", partial(Loop, layout="tpW"), stream_bytes, peers=("transformers tp",)),
    Entry("own loop cp", partial(OwnLoop, layout="cpW ulysses zero1"), ulysses_bytes),
    Entry("isograd accelerate cp", partial(Loop, layout="cpW ulysses zero1"), ulysses_bytes),
]


def main() -> None:
    chosen = report.options(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = StoredSizes(batch=chosen.batch, folder=folder).for_ranks(chosen.ranks)
        store(sizes)  # type: ignore[arg-type]
        report.contest("integrations", report.chosen_of([ONE, *ENTRIES], chosen.only), sizes, chosen, [], reference=ONE)


if __name__ == "__main__":
    main()
