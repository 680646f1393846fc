"""What `.grad` of an engine's parameter holds between a step's first backward and its end: a stand-in that says why.

Gradients of a step belong to its state (engine/step.py). If `.grad` were None in the meantime, clipping by hand
would return 0, `zero_grad` would drop nothing, and a stray `loss.backward()` would add to the step, all without a word.
The stand-in has the parameter's shape and no memory. Everything that reads it, adds to it or clears it in place raises
IG551; `zero_grad`, which replaces it by None, is noticed by the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as tree

from isograd.errors import EngineError


def take_grad(tensor: Tensor) -> Tensor | None:
    """What autograd has put into `.grad`, which is None then."""
    gradient = tensor.grad
    set_grads([(tensor, None)])
    return gradient


def set_grads(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """(tensor, its `.grad`): nothing else of the engine writes it."""
    for tensor, gradient in pairs:
        tensor.grad = gradient


class GradPlaceholder(Tensor):
    """A gradient without values. `slot_name`: the parameter's name."""

    @staticmethod
    def __new__(cls, like: Tensor, slot_name: str) -> GradPlaceholder:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, like: Tensor, slot_name: str) -> None:
        self.slot_name = slot_name

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = next((arg.slot_name for arg in tree.tree_leaves(args) if isinstance(arg, GradPlaceholder)), "")
        raise EngineError("IG551", found=found, func=func)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"GradPlaceholder({self.slot_name!r}: engine.grads() shows gradients)"


def changed_by_hand(whose: str, where: str, seen: str = "zero_grad(), or an assignment to .grad") -> EngineError:
    """IG553."""
    return EngineError("IG553", seen=seen, where=where, whose=whose)
