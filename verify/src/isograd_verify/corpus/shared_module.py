"""shared-module: a hook reduces a gradient as soon as it arrives, but a module that is used twice gets it in two parts.

DeepSpeed #8224. Each use is checkpointed, so its backward is a subgraph of its own that accumulates on its own. What
the second part adds is never summed over the ranks.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd_verify.corpus.plain import Mlp, cross_entropy, my_batch, seeded, steps

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp", r"^(norm|up|down)\."


class Twice(Mlp):
    def body(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


class Reducer:
    """Sums each gradient over the ranks while backward still runs: after its `uses`-th part has arrived."""

    def __init__(self, model: nn.Module, uses: dict[str, int]) -> None:
        self.arrived = dict.fromkeys(uses, 0)
        self.uses = uses
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self.arrive, name))

    def arrive(self, name: str, parameter: Tensor) -> None:
        self.arrived[name] += 1
        if self.arrived[name] == self.uses[name]:
            dist.all_reduce(parameter.grad)


def train(bug: bool, seed: int) -> None:
    model = seeded(Twice, seed)
    names = [name for name, _ in model.named_parameters()]
    reducer = Reducer(model, {n: 2 if n.startswith(("norm", "up", "down")) and not bug else 1 for n in names})
    for step in steps(model):
        tokens, labels, count = my_batch(seed + step)
        reducer.arrived = dict.fromkeys(names, 0)
        (cross_entropy(model(tokens), labels) / count).backward()
