"""Garbage collection, without what imported modules have made.

torch, transformers and others make a million objects as they are imported. Each full collection looks at them again,
which was a tenth of the CPU time of the tests. None of them is garbage, and none will be.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

_modules = 0  # when garbage was last collected here


def settle() -> None:
    """Where many modules are new, take all that is there out of the collector's sight."""
    global _modules
    if len(sys.modules) > _modules + 50:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, in a rank."""
    settle()
    return function(*arguments)
