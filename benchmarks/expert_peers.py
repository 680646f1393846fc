"""transformers' own expert parallelism (5.23, `DistributedConfig(ep_size=...)`, all-to-all), and its model alone.

With `fsdp_size` ranks take different sequences, dense weights are FSDP2's, and experts are cut. With `tp_size` all
ranks take the whole batch, and attention is cut, too. transformers has no expert parallelism beside whole dense
weights. Its older `enable_expert_parallel=True` is not here: it empties the plan of tp, for want of which 5.23 then
refuses it. Experts are its eager loop: on CPU its default, grouped_mm, took more than twice that loop's step time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.contestant import Contestant, Entry, nothing
from benchmarks.expert_task import ExpertSizes, adamw, gather_twice, stream_and_slots
from benchmarks.task import IGNORE, Batch

NAMES = (
    ("model.", ""), ("layers.", "blocks."), ("self_attn.", "attention."), ("_proj", ""),
    ("attention.o.", "attention.out."), ("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2"),
    ("mlp.gate.", "mlp.router."), ("embed_tokens", "embed"), ("lm_head", "head"),
)  # fmt: skip


class OneProcess(Contestant):
    """The reference: transformers' model on the whole batch."""

    def __init__(self, sizes: ExpertSizes, rank: int, world: int, **distributed: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.rank, self.world, self.cuts = rank, world, "fsdp_size" in distributed
        options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
        if distributed:
            from transformers.distributed import DistributedConfig

            options["distributed_config"] = DistributedConfig(**dict.fromkeys(distributed, world))
        self.model = AutoModelForCausalLM.from_pretrained(sizes.folder, **options).train()
        groups: dict[str, list[torch.nn.Parameter]] = {}  # fused AdamW takes parameters of one mesh at a time
        for parameter in self.model.parameters():
            groups.setdefault(str(getattr(parameter, "device_mesh", None)), []).append(parameter)
        self.optimizer = adamw([{"params": group} for group in groups.values()])

    def backward(self, batch: Batch) -> None:
        mine = batch.share(self.rank, self.world) if self.cuts else batch
        logits = self.model(mine.tokens, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), mine.labels.flatten(), ignore_index=IGNORE).backward()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            called = reduce(lambda text, pair: text.replace(*pair), NAMES, name)
            if called.endswith("gate_up"):
                gate, up = whole.chunk(2, 1)
                yield called.replace("gate_up", "gate"), gate
                yield called.replace("gate_up", "up"), up
            else:
                yield called, whole

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


ONE = Entry("one process", OneProcess, nothing, alone=True)
PEERS = [
    Entry("transformers fsdp ep", partial(OneProcess, fsdp_size=0, ep_size=0), gather_twice),
    Entry("transformers tp ep", partial(OneProcess, tp_size=0, ep_size=0), stream_and_slots),
]
