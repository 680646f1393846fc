"""The task of benchmarks.experts: a Qwen3-MoE of about 28 million parameters, stored once, which all contestants read.

How evenly its experts are used is set by its weights. All embeddings share one large coordinate; a router's weight for
that coordinate is its expert's advantage, which is fitted to the wanted shares. A step of 1e-6 does not change them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.task import Sizes, batch

STEP = 1e-6
COMMON = 3.0  # the coordinate that all embeddings share


@dataclass(frozen=True, kw_only=True)
class ExpertSizes(Sizes):
    layers: int = 4
    experts: int = 16
    per_token: int = 2
    width: int = 256
    load: str = "even"  # of the experts: "even" | "zipf"
    folder: str = ""  # of the stored weights, and those of the miniature
    turns: tuple[int, int] = (1, 1)  # rounds, and steps of each: whose tokens the wire carries

    def dense(self) -> int:
        """Parameters that every data rank holds."""
        per_layer = 4 * self.hidden**2 + 2 * self.hidden + 2 * self.hidden // self.heads + self.experts * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * per_layer + self.hidden

    def routed(self) -> int:
        """Parameters of all routed experts."""
        return self.layers * self.experts * 3 * self.hidden * self.width

    def parameters(self) -> int:
        return self.dense() + self.routed()

    def tiny(self) -> ExpertSizes:
        return replace(self, vocab=64, hidden=8 * self.heads, width=16, seq=8, folder=str(Path(self.folder) / "tiny"))

    def described(self) -> dict[str, Any]:
        """As transformers' configuration."""
        return {
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.width,
            "moe_intermediate_size": self.width, "head_dim": self.hidden // self.heads, "norm_topk_prob": True,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
            "num_experts": self.experts, "num_experts_per_tok": self.per_token, "output_router_logits": False,
            "max_position_embeddings": self.seq, "tie_word_embeddings": False,
        }  # fmt: skip


def adamw(parameters: Iterable[nn.Parameter] | list[dict[str, list[nn.Parameter]]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=STEP, weight_decay=0.0, fused=True)


@torch.no_grad()
def store(sizes: ExpertSizes) -> None:
    """Write the model and its miniature."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for size in (sizes, sizes.tiny()):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**size.described()))
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = COMMON
        advantage = fitted(size.load, size.experts, size.per_token)
        for layer in model.model.layers:
            router = layer.mlp.gate.weight
            router.normal_(std=size.hidden**-0.5)
            router[:, 0] = advantage[torch.randperm(size.experts)] / COMMON
        model.save_pretrained(size.folder)


def shares(load: str, experts: int) -> Tensor:
    """Of all slots, those of each expert."""
    each = torch.ones(experts) if load == "even" else 1 / torch.arange(1, experts + 1)
    return each / each.sum()


def fitted(load: str, experts: int, k: int) -> Tensor:
    """What is added to normal logits, so that experts are among the k best as often as `load` says."""
    wanted, noise = shares(load, experts), torch.randn(20_000, experts)
    advantage = wanted.log()
    for _ in range(100):
        found = (advantage + noise).topk(k).indices.flatten().bincount(minlength=experts).clamp(min=1).float()
        advantage += 0.5 * (wanted / (found / found.sum())).log()
    return advantage


@lru_cache
@torch.no_grad()
def chosen(sizes: ExpertSizes) -> list[list[Tensor]]:
    """The experts [tokens, k] of each layer, for each step of the race's turns: the plain model's own choice."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sizes.folder, dtype=torch.float32)
    rounds, steps = sizes.turns
    found = []
    for number in range(steps, (rounds + 1) * steps):
        logits = model(batch(sizes, number).tokens, output_router_logits=True).router_logits
        found.append([each.topk(sizes.per_token).indices for each in logits])
    return found


def crossing(sizes: ExpertSizes, ep: int) -> float:
    """How many slots leave a rank there, and how many results leave it back, in one forward of a step; of the rank that
    sends most, as the race takes it: the median of its rounds."""
    sent = []
    for layers in chosen(sizes):
        of_rank = torch.zeros(ep)
        for indices in layers:
            table = torch.stack([(part // (sizes.experts // ep)).flatten().bincount(minlength=ep)
                                 for part in indices.chunk(ep)])  # fmt: skip
            table.fill_diagonal_(0)
            of_rank += table.sum(0) + table.sum(1)
        sent.append(of_rank)
    rounds, steps = sizes.turns
    turns = torch.stack(sent).view(rounds, steps, ep).mean(1)
    return statistics.median(turns.amax(1).tolist())


def busiest(sizes: ExpertSizes, ep: int) -> float:
    """Slots of the rank that computes most, over an even share; the mean over layers and steps."""
    found = []
    for layers in chosen(sizes):
        for indices in layers:
            load = (indices // (sizes.experts // ep)).flatten().bincount(minlength=ep).float()
            found.append(float(load.max() / load.mean()))
    return statistics.mean(found)


# -- what cannot be avoided to send ----------------------------------------------------------------------------------


def slots_bytes(sizes: ExpertSizes, world: int) -> float:
    """There and back in forward, and the same in backward, in fp32."""
    return 2 * crossing(sizes, world) * sizes.hidden * 4


def reduce_and_gather(sizes: ExpertSizes, world: int) -> float:
    """Slots; and of the dense part each gradient to its owner, each result back."""
    return slots_bytes(sizes, world) + 2 * (world - 1) / world * 4 * sizes.dense()


def gather_twice(sizes: ExpertSizes, world: int) -> float:
    """Slots; and dense blocks that are gathered for forward and again for backward, and their gradients."""
    root = 2 * sizes.vocab * sizes.hidden + sizes.hidden
    return slots_bytes(sizes, world) + (world - 1) / world * 4 * (3 * sizes.dense() - root)


def stream_and_slots(sizes: ExpertSizes, world: int) -> float:
    """Under tp: slots; sums of the stream after the embedding and attention, of its gradient before attention and the
    head; and gathers of what the experts gave, and of its gradient."""
    stream = (world - 1) / world * sizes.batch * sizes.seq * sizes.hidden * 4
    return slots_bytes(sizes, world) + stream * (2 * (2 + 2 * sizes.layers) + 2 * sizes.layers)
