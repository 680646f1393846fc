"""Sees embeddings whose backward adds rows of one token id in half precision: each is done again in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isograd_verify import tolerances
from isograd_verify.record.events import RowSums
from isograd_verify.record.sketch import dtype_name
from isograd_verify.watch.recorder import Recorder

LIMIT = 1 << 24  # numbers that come back to one call


def look(c: Recorder, args: Any, made: Tensor) -> None:
    """An embedding's backward has made the weight's gradient of `args`."""
    came, ids, _, padding, by_count = args[:5]
    used = ids.flatten() != padding
    if made.dtype not in (torch.bfloat16, torch.float16) or by_count or came.numel() > LIMIT or not bool(used.any()):
        return
    which, places, counts = ids.flatten()[used].unique(return_inverse=True, return_counts=True)
    exact = torch.zeros(len(which), made.shape[1], dtype=torch.float64, device=made.device)
    exact.index_add_(0, places, came.detach().flatten(0, -2)[used].double())
    apart = (made.detach()[which].double() - exact).norm(dim=1)
    error, worst = float(apart.norm() / exact.norm().clamp_min(1e-300)), int(apart.argmax())
    if error > tolerances.ROW_SUMS * torch.finfo(made.dtype).eps:
        id_of, times, kind = int(which[worst]), int(counts[worst]), dtype_name(made)
        alike = [n for m, n in c.modules.items() if isinstance(m, nn.Embedding) and m.weight.shape == made.shape]
        module = alike[0] if len(alike) == 1 else c.behind
        c.event(RowSums(*c.now, module=module, dtype=kind, error=error, token=id_of, times=times))
