"""Finds and names gradient bugs in any torch.distributed program: `isograd.verify(case, layouts)`, `isograd verify`.

The rooms, in the order in which a gradient passes through them: watch/ sees it inside the program's own process,
record/ holds what was seen, judge/ finds what is wrong without a reference and compare/ with one, tell/ puts it into
words. run/ starts foreign programs and the corpus of known bugs (isograd.corpus); prove.py runs a case under layouts.

The module itself can be called: isograd.verify(case, layouts) is isograd.verify.verify(case, layouts).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.verify.case import Case as Case
    from isograd.verify.compare.numerics import taylor as taylor
    from isograd.verify.inside import lightning_callback as lightning_callback
    from isograd.verify.inside import trainer_callback as trainer_callback
    from isograd.verify.inside import watching as watching
    from isograd.verify.prove import assert_same_gradients as assert_same_gradients
    from isograd.verify.prove import verify as verify
    from isograd.verify.tell.findings import Finding as Finding
    from isograd.verify.tell.findings import Subject as Subject
    from isograd.verify.tell.report import Report as Report
    from isograd.verify.watch.weighing import weigh as weigh

_HOMES = {
    "Case": "isograd.verify.case",
    "Finding": "isograd.verify.tell.findings",
    "Report": "isograd.verify.tell.report",
    "Subject": "isograd.verify.tell.findings",
    "assert_same_gradients": "isograd.verify.prove",
    "verify": "isograd.verify.prove",
    "taylor": "isograd.verify.compare.numerics",
    "weigh": "isograd.verify.watch.weighing",
    "lightning_callback": "isograd.verify.inside",
    "trainer_callback": "isograd.verify.inside",
    "watching": "isograd.verify.inside",
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
