"""Backwards of our own that cannot be differentiated: a gradient of a gradient (create_graph=True) is refused.

torch's once_differentiable alone refuses it only where the gradient from above has a graph. That of a loss has none,
and torch then takes what such a backward returns for a constant: second derivatives lack a part, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from isograd.errors import ModelError


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of once_differentiable."""
    plain = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward: with create_graph alone
            raise ModelError("IG409", operation=backward.__qualname__.split(".")[0].lstrip("_"))
        return plain(ctx, *gradients)

    return refusing
