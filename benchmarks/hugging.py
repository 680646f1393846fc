"""A model of transformers side by side: under its own tensor parallelism, under ig.hf, and as isograd's decoder.

    python -m benchmarks.hugging                        # 2 ranks, a Llama of 20 M parameters, a few minutes
    python -m benchmarks.hugging --only "one process" "*tp"

All contestants read one stored Llama, and every rank sees the whole batch; the pipelines cut it into micro-batches. The
columns are those of benchmarks.data_parallel. "wire" is bounded by the sums of the residual stream (tp), and by the
stream and its gradient from stage to stage (pp).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import isograd as ig
from benchmarks import report
from benchmarks.contestant import Contestant, Entry, adamw, nothing
from benchmarks.ours import Isograd
from benchmarks.pipeline_peers import passed_bytes
from benchmarks.task import IGNORE, Batch, Sizes
from benchmarks.tensor_peers import stream_bytes
from isograd.hf.configs import load_config
from isograd.hf.families import HuggingFace

NAMES = (
    ("model.", ""), ("layers.", "blocks."), ("self_attn.", "attention."), ("_proj", ""),
    ("attention.o.", "attention.out."),
    ("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2"), ("embed_tokens", "embed"), ("lm_head", "head"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredSizes(Sizes):
    folder: str = ""  # of the stored weights, and those of the miniature

    def tiny(self) -> StoredSizes:
        return replace(super().tiny(), folder=str(Path(self.folder) / "tiny"))  # type: ignore[return-value, type-var]


def store(sizes: StoredSizes) -> None:
    """Write the model and its miniature."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for size in (sizes, sizes.tiny()):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.mlp,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads,
            max_position_embeddings=size.seq + 1, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(size.folder)


def called(name: str) -> str:
    """transformers' name of a parameter, as isograd's decoder calls it."""
    return reduce(lambda text, pair: text.replace(*pair), NAMES, name)


class Theirs(Contestant):
    """transformers' model, in one process or cut by itself."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, cut: bool = False) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        options: dict[str, Any] = {"dtype": torch.float32}
        if cut:
            from transformers.distributed import DistributedConfig

            options["distributed_config"] = DistributedConfig(tp_size=world)
        self.model = AutoModelForCausalLM.from_pretrained(sizes.folder, **options).train()
        groups: dict[str, list[torch.nn.Parameter]] = {}  # fused AdamW takes parameters of one mesh at a time
        for parameter in self.model.parameters():
            groups.setdefault(str(getattr(parameter, "device_mesh", None)), []).append(parameter)
        self.optimizer = adamw([{"params": group} for group in groups.values()])  # type: ignore[arg-type]

    def backward(self, batch: Batch) -> None:
        logits = self.model(batch.tokens, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            yield called(name), gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Loaded(Isograd):
    """The same class under ig.hf."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, layout: str) -> None:
        self.mesh, self.micro_batches = ig.Mesh(layout.replace("W", str(world))), sizes.micro_batches
        self.model = ig.hf.load(sizes.folder, self.mesh, prove=False)
        self.engine = ig.Engine(self.model, self.mesh, adamw)

    def given(self, batch: Batch) -> dict[str, Tensor]:
        """As transformers has labels, not shifted: with one token more than the task's rows, for the last label."""
        tokens, labels = F.pad(batch.tokens, (0, 1)), F.pad(batch.labels, (1, 0), value=IGNORE)
        return {"input_ids": tokens, "labels": labels}

    def step(self, batch: Batch) -> None:
        if self.mesh.size("pp") > 1:
            self.engine.train_step(self.given(batch), self.micro_batches)
        else:
            super().step(batch)

    def backward(self, batch: Batch) -> None:
        if self.mesh.size("pp") > 1:
            self.engine.accumulate(self.given(batch), self.micro_batches)
            return
        count = (batch.labels != IGNORE).sum()
        labels = {"labels": batch.labels, "shift_labels": batch.labels, "num_items_in_batch": count}
        self.engine.backward(self.model(batch.tokens, use_cache=False, **labels).loss, weight=count)

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((called(name), gradient) for name, gradient in self.engine.grads().items())


class Own(Loaded):
    """isograd's decoder with the same weights."""

    def __init__(self, sizes: StoredSizes, rank: int, world: int, *, layout: str) -> None:
        self.mesh, self.micro_batches = ig.Mesh(layout.replace("W", str(world))), sizes.micro_batches
        config = load_config(sizes.folder)
        self.model = ig.models.Transformer(config, self.mesh)
        self.engine = ig.Engine(self.model, self.mesh, adamw, weights=HuggingFace(sizes.folder, config))

    def step(self, batch: Batch) -> None:
        if self.mesh.size("pp") > 1:
            self.engine.train_step((batch.tokens, batch.labels), self.micro_batches)
        else:
            super().step(batch)

    def backward(self, batch: Batch) -> None:
        if self.mesh.size("pp") > 1:
            self.engine.accumulate((batch.tokens, batch.labels), self.micro_batches)
            return
        loss, count = self.model(batch.tokens, batch.labels)
        self.engine.backward(loss, weight=count)


ONE = Entry("one process", Theirs, nothing, alone=True)
ENTRIES = [
    Entry("transformers tp", partial(Theirs, cut=True), stream_bytes),
    Entry("isograd tp", partial(Own, layout="tpW"), stream_bytes, peers=("transformers tp",)),
    Entry("ig.hf tp", partial(Loaded, layout="tpW"), stream_bytes, peers=("transformers tp",)),
    Entry("isograd pp", partial(Own, layout="ppW 1f1b"), passed_bytes),
    Entry("ig.hf pp", partial(Loaded, layout="ppW 1f1b"), passed_bytes, peers=("isograd pp",)),
]


def main() -> None:
    chosen = report.options(__doc__ or "").parse_args()
    entries = report.chosen_of([ONE, *ENTRIES], chosen.only)
    with tempfile.TemporaryDirectory() as folder:
        sizes = StoredSizes(batch=chosen.batch, folder=folder).for_ranks(chosen.ranks)
        store(sizes)  # type: ignore[arg-type]
        report.contest("hugging", entries, sizes, chosen, [], reference=ONE)


if __name__ == "__main__":
    main()
