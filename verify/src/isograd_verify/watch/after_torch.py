"""Calls a function once, right after a program has imported torch: what is watched begins there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class AfterTorch(MetaPathFinder, Loader):
    """Finds torch as Python would, and calls `then` when it has been imported. An error there is printed."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """The spec of torch, with this as its loader; nothing else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self.inner, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """As the loader that Python would have taken, and then the function."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.inner
        self.inner.exec_module(module)
        try:
            self.then()
        except Exception as error:
            print(f"isograd-verify: cannot watch this process: {type(error).__name__}: {error}", file=sys.stderr)
