"""Hooks of one module that know what to do in a copy of it, and refusals to copy a model whose parameters are absent.

`copy.deepcopy`, `torch.save(model)`, `state_dict` and `load_state_dict` of a ZeRO 3 model would see NaN in place of the
parameters that are not gathered. Outside of `with engine.full_parameters():` they are refused. Inside they work, and a
copy is an ordinary model: our hooks do nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from isograd.comm import ops
from isograd.errors import EngineError

Named = Callable[[BaseException], BaseException | None]


def _naming(function: Callable[..., Any], named: Named) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (RuntimeError, EngineError) as error:
            found = named(error)
            if found is None:
                raise
            raise found from error

    return call


class Hook:
    """A function that torch calls for one module, and for no copy of it."""

    def __init__(self, function: Callable[..., Any], refuse: Callable[[str], None], named: Named | None = None) -> None:
        """`refuse(what)` raises while parameters are absent. named: what to raise in the place of an error, or None."""
        self._function = ops.uncompiled(function if named is None else _naming(function, named))
        self._refuse = refuse

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        self._refuse("copy.deepcopy")
        return nothing

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse("torch.save(model)")
        return _nothing, ()


class Handles(list[Any]):
    """Of the hooks of a parameter. A saved copy of it has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


def nothing(*_: Any) -> None:
    """What a hook is in a copy of its module."""


def _nothing() -> Callable[..., None]:
    return nothing


def refuse_absent(what: str, where: str) -> EngineError:
    """The error for reading or writing parameters that are not gathered."""
    return EngineError(
        "IG574",
        f"{what} of a ZeRO 3 model whose parameters are not gathered",
        seen="parameters that are NaN outside of the model's forward",
        expected="with engine.full_parameters(): on all ranks, around it",
        fix="put the call inside 'with engine.full_parameters():'; to save a run, use isograd.checkpoint, which "
        "gathers nothing",
        where=where,
    )


def guard_state(module: nn.Module, refuse: Callable[[str], None]) -> list[Any]:
    """Refuse to read or to load the state of a module while its parameters are absent; handles to undo that."""
    reading = Hook(lambda *_: refuse("state_dict()"), refuse)
    loading = Hook(lambda *_: refuse("load_state_dict()"), refuse)
    return [module.register_state_dict_pre_hook(reading), module.register_load_state_dict_pre_hook(loading)]
