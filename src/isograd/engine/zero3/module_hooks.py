"""Hooks of one module that do nothing in a copy of it, and refusals to copy a model whose parameters are not full.

`copy.deepcopy`, `torch.save(model)`, `state_dict` and `load_state_dict` of a ZeRO 3 model would see NaN in place of the
parameters that are not gathered. Outside of `with engine.full_parameters():` they are refused. Inside they work, and a
copy is an ordinary model: our hooks do nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from isograd.comm import ops
from isograd.errors import EngineError


class Hook:
    """A function that torch calls for one module, and for no copy of it."""

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        """`owner`: the Zero3Hooks of the model. `named` says what to raise in the place of an error, or None."""
        self._function, self.owner = ops.uncompiled(function), owner

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._function(*arguments)
        except (RuntimeError, EngineError) as error:
            found = self.owner.named(error)
            if found is None:
                raise
            raise found from error

    def __deepcopy__(self, memo: object) -> Nothing:
        self.owner.refuse_absent("copy.deepcopy")
        return Nothing()

    def __reduce__(self) -> tuple[Any, ...]:
        self.owner.refuse_absent("torch.save(model)")
        return Nothing, ()


class Nothing:
    """What a hook is in a copy of its module."""

    def __call__(self, *_: Any) -> None:
        pass


class Handles(list[Any]):
    """Of the hooks of a parameter, the step state of their engine, and what they call, which lives as long as the
    parameter. A saved copy of it has none."""

    def __init__(self, handles: Iterable[Any] = (), holder: Any = None, called: Any = None) -> None:
        super().__init__(handles)
        self.holder, self.called = holder, called

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


def owner_of(model: nn.Module) -> Any:
    """Who has made the hooks of a model; None: nobody."""
    return next((hook.owner for hook in model._forward_pre_hooks.values() if isinstance(hook, Hook)), None)


def differentiable(output: Any) -> list[Tensor]:
    """Tensors with a graph, in whatever a module returns."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    inside: Iterable[Any] = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, list | tuple | set):
        inside = output
    elif is_dataclass(output) and not isinstance(output, type):
        inside = [getattr(output, f.name) for f in fields(output)]
    return [tensor for part in inside for tensor in differentiable(part)]
