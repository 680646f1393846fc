"""One device: isograd's decoder under its Engine, transformers' Llama and the plain model, eager and compiled.

    python -m benchmarks.one_device                      # one process, one thread, 8 x 256 tokens; minutes
    python -m benchmarks.one_device --batch 2
    python -m benchmarks.one_device --only "one process" "transformers*" isograd
    python -m benchmarks.one_device --operators          # time and memory of single operators beside torch's
    python -m benchmarks.one_device --first              # from the start of a process to the end of its first step

All have the same weights and batches, and fused AdamW; gradients are compared with the plain model's ("one process").
"compiled": torch.compile with inductor, which needs a C++ compiler. "blocks": each block is a region of its own, which
is how isograd's decoder is compiled; "whole": the whole model is. Graph breaks are counted in miniature, before the
race. The columns are those of benchmarks.data_parallel.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import isograd as ig
from benchmarks import first_step, operators, report, seat
from benchmarks.contestant import ONE, Contestant, Entry, OneProcess, adamw, nothing
from benchmarks.hugging import called
from benchmarks.model import Decoder
from benchmarks.ours import IsogradModel
from benchmarks.task import Batch, Sizes, batch
from isograd.launcher.launch import World, start_method

BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


def compile_in_place(model: nn.Module, blocks: Iterable[nn.Module], region: str, backend: str) -> None:
    """`region`: "blocks", "whole", or "" for neither."""
    if region:
        torch._dynamo.reset()  # after the miniature's, the sizes of the race would be compiled as variable
    for module in {"blocks": blocks, "whole": [model], "": []}[region]:
        module.compile(backend=backend, dynamic=False)


class Plain(OneProcess):
    def __init__(self, sizes: Sizes, rank: int, world: int, *, region: str, backend: str = BACKEND) -> None:
        super().__init__(sizes, rank, world)
        compile_in_place(self.model, self.model.blocks, region, backend)


class Llama(Contestant):
    """transformers' own class, with the loss that it computes itself."""

    def __init__(self, sizes: Sizes, rank: int, world: int, *, region: str = "", backend: str = BACKEND) -> None:
        self.model = llama(sizes)
        self.optimizer = adamw(self.model.parameters())
        compile_in_place(self.model, self.model.model.layers, region, backend)

    def backward(self, batch: Batch) -> None:
        labels = {"labels": batch.labels, "shift_labels": batch.labels}  # the task's are shifted already
        self.model(batch.tokens, use_cache=False, **labels).loss.backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((called(name), p.grad) for name, p in self.model.named_parameters())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Own(IsogradModel):
    def __init__(self, sizes: Sizes, rank: int, world: int, *, region: str = "", backend: str = BACKEND) -> None:
        super().__init__(sizes, ig.Layout())
        compile_in_place(self.model, self.model.blocks, region, backend)


@torch.no_grad()
def llama(sizes: Sizes) -> Any:
    """With the plain model's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.seq, rms_norm_eps=1e-6, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    plain = dict(Decoder(sizes).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(plain[called(name)])
    return model


EAGER = [
    Entry("transformers' Llama", Llama, nothing),
    Entry("isograd", Own, nothing, peers=("transformers' Llama", ONE.name)),
]
COMPILED = [
    *(Entry(f"plain, compiled {region}", partial(Plain, region=region), nothing) for region in ("blocks", "whole")),
    *(Entry(f"Llama, compiled {region}", partial(Llama, region=region), nothing) for region in ("blocks", "whole")),
]
COMPILED += [
    Entry(
        "isograd, compiled blocks",
        partial(Own, region="blocks"),
        nothing,
        peers=tuple(entry.name for entry in COMPILED),
    )
]


def regions(entry: Entry, sizes: Sizes) -> tuple[int, int]:
    """(graph breaks, graphs) of the first step of a compiled contestant; a rank's work."""
    from torch._dynamo.utils import counters

    assert isinstance(entry.build, partial)
    with seat.unheard():
        contestant = entry.build(sizes, 0, 1, backend="eager")
        counters.clear()
        contestant.step(batch(sizes, 0))
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def counted(entries: Iterable[Entry], sizes: Sizes) -> str:
    """The graph breaks of compiled contestants, in words."""
    words = []
    for entry in entries:
        with World(1) as world:
            breaks, graphs = world.run(regions, entry, sizes)[0]
        words.append(f"{entry.name}: {breaks} in {graphs} graph{'s' * (graphs != 1)}")
    return "graph breaks: " + "; ".join(words)


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--operators", action="store_true", help="measure single operators instead")
    parser.add_argument("--first", action="store_true", help="measure the way to the first step instead")
    parser.set_defaults(ranks=1)
    chosen = parser.parse_args()
    if chosen.ranks != 1:
        raise SystemExit("--ranks: one device is one process")
    if chosen.operators:
        operators.main(chosen)
    elif chosen.first:
        first_step.main(chosen)
    else:
        race(chosen)


def race(chosen: argparse.Namespace) -> None:
    entries = report.chosen_of([ONE, *EAGER, *COMPILED], chosen.only)
    sizes = dataclasses.replace(Sizes(), batch=chosen.batch)
    compiled = [entry for entry in entries if entry in COMPILED]
    notes = [f"compiled: torch.compile, {BACKEND}"] if compiled else []
    if compiled and BACKEND != "inductor":
        notes.append("inductor was left out: it needs a C++ compiler, and none is installed")
    if compiled:
        start_method(["benchmarks.seat", "torch._dynamo"])
        notes.append(counted(compiled, sizes.tiny()))
    report.contest("one_device", entries, sizes, chosen, notes)


if __name__ == "__main__":
    main()
