"""The engine's own proof: a model's gradients under many layouts against one device.

isograd.verify(case, layouts)                      the report; the same as isograd.prove.verify
isograd.prove.assert_same_gradients(case, layouts) for test suites
isograd.prove.Case(model, batch, loss=...)         what a case function returns
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.prove.case import Case as Case
    from isograd.prove.prove import assert_same_gradients as assert_same_gradients
    from isograd.prove.prove import verify as verify
    from isograd.prove.slopes import taylor_test as taylor_test

_HOMES = {
    "Case": "isograd.prove.case",
    "assert_same_gradients": "isograd.prove.prove",
    "verify": "isograd.prove.prove",
    "taylor_test": "isograd.prove.slopes",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'isograd.prove' has no attribute {name!r}")
