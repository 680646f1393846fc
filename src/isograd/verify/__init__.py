"""Finds and names gradient bugs in any torch.distributed program: `isograd.verify(case, layouts)`, `isograd verify`.

The room's parts, in the order in which a gradient passes through them: hooks, collectives and capture watch a rank;
recording is what they write; analysis and contributions read it; checks, compare and diagnose judge; findings, report
and html tell. prove runs a case under layouts, attach watches a foreign program, bugs is the corpus of known bugs.

The module itself can be called: isograd.verify(case, layouts) is isograd.verify.verify(case, layouts).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.verify.case import Case as Case
    from isograd.verify.compare import compare as compare
    from isograd.verify.findings import Finding as Finding
    from isograd.verify.findings import Report as Report
    from isograd.verify.findings import Subject as Subject
    from isograd.verify.numerics import taylor as taylor
    from isograd.verify.prove import assert_same_gradients as assert_same_gradients
    from isograd.verify.prove import verify as verify

_HOMES = {
    "Case": "isograd.verify.case",
    "Finding": "isograd.verify.findings",
    "Report": "isograd.verify.findings",
    "Subject": "isograd.verify.findings",
    "assert_same_gradients": "isograd.verify.prove",
    "verify": "isograd.verify.prove",
    "taylor": "isograd.verify.numerics",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'isograd.verify' has no attribute {name!r}")


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from isograd.verify.prove import verify

        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
