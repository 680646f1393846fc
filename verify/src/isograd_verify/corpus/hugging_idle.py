"""expert-none in a transformers model: the experts of a rank have no tokens, its part of their weights is not used, and
has no gradient instead of one of zeros. On one device the tensor of all experts has one, so its weights decay.

The library keeps the experts of a layer as one tensor, so a single idle expert among busy ones has its zeros, and only
a rank whose experts are all idle shows it: most often one whose ep is large. Automodel #2995.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from isograd_verify.corpus.hugging import TRANSFORMERS, gathered, language_model, logits_of, spread
from isograd_verify.corpus.mixture import EXPERTS, routed, take_seat
from isograd_verify.corpus.plain import cross_entropy, my_batch, steps

NEEDS = TRANSFORMERS
WORLD, LAYOUT = 2, "dp2 ep2"
BUGS = {"expert-none": ("", r"\.experts\.")}


def prefer_the_first(router: Tensor) -> None:
    """With one expert per token nobody chooses the last: of w and -w one is above w / 2 and -w / 2."""
    first = router[:1].clone()
    half = torch.linspace(0.5, 0.1, EXPERTS // 2 - 1).view(-1, 1)
    router.copy_(torch.cat([first, -first, *(part * first for part in (half, -half))]))


def train(bug: str, seed: int) -> None:
    """Two steps; `bug` leaves the gradient of a rank whose experts nobody has chosen at None."""
    model = language_model(seed, num_experts_per_tok=1, norm_topk_prob=False)
    block = model.model.layers[0].mlp
    prefer_the_first(block.gate.weight.data)
    block.gate.weight.requires_grad_(False)
    spread(model, 0, take_seat(2), gathered)
    for step in steps(model, weight_decay=0.1):
        tokens, labels, count = my_batch(seed + step)
        (cross_entropy(logits_of(model, tokens), labels) / count).backward()
        for name, parameter in model.named_parameters():
            if routed(name) and parameter.grad is None and not bug:
                parameter.grad = torch.zeros_like(parameter)
            if not routed(name) and parameter.requires_grad:
                dist.all_reduce(parameter.grad)
