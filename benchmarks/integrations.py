"""Loops of other libraries' users, each under the library's own parallelism and under isograd's integration.

    python -m benchmarks.integrations                   # 2 ranks, a Llama of 20 M parameters, a few minutes
    python -m benchmarks.integrations --only "one process" "*tp" --rounds 9

One stored Llama and one layout for each pair: accelerate's FSDP2 and `zero3` on two data ranks, transformers' own tp
and `tp`, DeepSpeed's Ulysses for transformers (which is what accelerate's `sp_size` runs) and `cp ulysses zero1`. Ours
are in accelerate's loop: prepare, backward, step, zero_grad; under cp also in DeepSpeed's. An "own loop" has
`ig.Engine` and no library around it; a second table has what the integration costs over it, and over the peer.
accelerate turns FSDP on for GPUs alone, and so its state is told here what it sets there. DeepSpeed races where it is
installed. The columns are those of benchmarks.data_parallel. MALLOC_MMAP_THRESHOLD_=131072 in the environment takes the
free memory that malloc keeps out of the peaks, and slows all.

At ZeRO 0 to 2 DeepSpeed sums gradients over sequence ranks and divides by data ranks alone, so a rank's loss is its
labels' sum over the number of all labels. The loss of accelerate's page and of the Trainer goes through
`torch.distributed.nn.functional.all_gather`, whose backward sums over the sequence ranks, too: on 2 of them twice the
gradient of one device. It has a row of its own.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor

import isograd as ig
from benchmarks import report
from benchmarks.contestant import Contestant, Entry, adamw, nothing
from benchmarks.data_peers import HAS_DEEPSPEED, DeepSpeed, gather_twice
from benchmarks.hugging import StoredSizes, Theirs, called, store
from benchmarks.ours import Isograd
from benchmarks.sequence_peers import ulysses_bytes
from benchmarks.task import IGNORE, Batch
from benchmarks.tensor_peers import stream_bytes


def given(batch: Batch) -> dict[str, Any]:
    """As a model of transformers takes it, which shifts labels by itself."""
    return {"input_ids": batch.tokens, "labels": F.pad(batch.labels[:, :-1], (1, 0), value=IGNORE)}


PLAIN: dict[str, Any] = {}  # transformers' attention, which DeepSpeed replaces


def loaded(sizes: StoredSizes) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(sizes.folder, dtype=torch.float32).train()
    model.config.use_cache = False
    return model


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


class Ulysses(DeepSpeed):
    """DeepSpeed's loop for transformers: sequences are dealt out, and each rank's loss weighs its labels."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, gathers_loss: bool = False) -> None:
        """gathers_loss: as DeepSpeed's tutorial, accelerate's and the Trainer do."""
        import deepspeed
        from deepspeed.runtime.sequence_parallel import parallel_state_sp as groups
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.rank, self.world, self.gathers_loss = rank, world, gathers_loss
        deepspeed.init_distributed("gloo", verbose=False)
        model = loaded(sizes)
        # The miniature's attention and groups are taken out again.
        groups._SEQUENCE_PARALLEL_GROUP = groups._SEQUENCE_DATA_PARALLEL_GROUP = None
        ALL_ATTENTION_FUNCTIONS["sdpa"] = PLAIN.setdefault("sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"])
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation="sdpa", sequence_parallel_size=world, micro_batch_size=sizes.batch,
        )  # fmt: skip
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": sizes.batch, "train_batch_size": sizes.batch,
            "sequence_parallel_size": world, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        parts = {"model": model, "optimizer": adamw(model.parameters()), "config": config, "mpu": mpu}
        self.engine = deepspeed.initialize(**parts)[0]

    def backward(self, batch: Batch) -> None:
        labels = F.pad(batch.labels[:, :-1], (0, 1), value=IGNORE)
        places = torch.arange(labels.shape[1]).expand_as(labels)
        tokens, places, labels = (
            t.chunk(self.world, 1)[self.rank].contiguous() for t in (batch.tokens, places, labels)
        )
        logits = self.engine(input_ids=tokens, position_ids=places).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        count = (labels != IGNORE).sum()
        dist.all_reduce(count)
        self.engine.backward((torch.stack(all_gather(loss)).sum() if self.gathers_loss else loss) / count)

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((called(name), gradient) for name, gradient in super().grads())


class InDeepSpeedsLoop(Isograd):
    """DeepSpeed's loop with isograd's engine, which takes whole rows and deals them out."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int) -> None:
        from isograd.integrations import deepspeed

        model = loaded(sizes)
        config = {
            "train_micro_batch_size_per_gpu": sizes.batch, "sequence_parallel_size": world,
            "zero_optimization": {"stage": 1},
        }  # fmt: skip
        self.loop = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]

    def backward(self, batch: Batch) -> None:
        self.loop.backward(self.loop(**given(batch)).loss)

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((called(name), gradient) for name, gradient in self.loop.engine.grads().items())

    def update(self) -> None:
        self.loop.step()


class Loop(Contestant):
    """accelerate's loop; a rank is given its rows, as a prepared loader does."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, layout: str | None) -> None:
        """layout: of isograd; None: accelerate's FSDP2."""
        import accelerate
        from accelerate.state import AcceleratorState, GradientState, PartialState

        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 1}
        os.environ |= {name: str(value) for name, value in told.items()}  # the world is there already
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        model = loaded(sizes)
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
ULYSSES = [
    Entry("DeepSpeed Ulysses", Ulysses, ulysses_bytes),
    Entry("DeepSpeed Ulysses, gathered loss", partial(Ulysses, gathers_loss=True), ulysses_bytes),
]
ENTRIES = [
    Entry("accelerate FSDP2", partial(Loop, layout=None), gather_twice),
    Entry("own loop zero3", partial(OwnLoop, layout="dpW zero3"), gather_twice),
    Entry("isograd accelerate zero3", partial(Loop, layout="dpW zero3"), gather_twice, peers=("accelerate FSDP2",)),
    Entry("transformers tp", partial(Whole, cut=True), stream_bytes),
    Entry("own loop tp", partial(OwnLoop, layout="tpW"), stream_bytes),
    Entry("isograd accelerate tp", partial(Loop, layout="tpW"), stream_bytes, peers=("transformers tp",)),
    *(ULYSSES if HAS_DEEPSPEED else []),
    Entry("own loop cp", partial(OwnLoop, layout="cpW ulysses zero1"), ulysses_bytes),
    Entry(
        "isograd accelerate cp", partial(Loop, layout="cpW ulysses zero1"), ulysses_bytes, peers=("DeepSpeed Ulysses",)
    ),
    Entry("isograd deepspeed cp", InDeepSpeedsLoop, ulysses_bytes, peers=("DeepSpeed Ulysses",)),
]


def costs(rows: list[dict[str, Any]]) -> None:
    """What the integration costs, as medians of ratios between turns of the same round: step, CPU, and peak memory."""
    named = {row["name"]: row for row in rows}
    table = Table(
        "integration", "over", "step", "CPU", "peak", title="at most 1.00 of a peer, 1.03 of an own loop's CPU"
    )
    for mine in (row for row in rows if row["name"].startswith("isograd")):
        own, found = f"own loop {mine['name'].split()[-1]}", {}
        if own in mine["beside"]:  # in another heat there is no such ratio
            pairs = (zip(mine[key], named[own][key], strict=True) for key in ("rounds_s", "rounds_cpu_s"))
            ratios = [statistics.median(a / b for a, b in pair) for pair in pairs]
            found[own] = [*ratios, mine["peak_bytes"] / named[own]["peak_bytes"]]
        if mine["peer"]:
            found[mine["peer"]] = [mine[key] for key in ("of_peer", "cpu_of_peer", "peak_of_peer")]
        for other, ratios in found.items():
            table.add_row(mine["name"], other, *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)


def main() -> None:
    chosen = report.options(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = StoredSizes(batch=chosen.batch, folder=folder).for_ranks(chosen.ranks)
        store(sizes)  # type: ignore[arg-type]
        entries = report.chosen_of([ONE, *ENTRIES], chosen.only)
        notes = [] if HAS_DEEPSPEED else ["DeepSpeed Ulysses: not raced, as DeepSpeed is not installed"]
        costs(report.contest("integrations", entries, sizes, chosen, notes, reference=ONE))


if __name__ == "__main__":
    main()
