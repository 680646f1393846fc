"""Python imports this at its start in every process of a watched program: `isograd verify run` puts its folder first.

It waits until the program has imported torch and either joins a process group or makes an optimizer, and only then
starts the capture; a launcher, a data loader's worker or a tokenizer's process is left alone. The user's own
sitecustomize, if there is one, runs as it would have.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(MetaPathFinder, Loader):
    """Finds torch as Python would, and runs `watched.prepare` when it has been imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self.inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self.inner.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        module.__spec__.loader = module.__loader__ = self.inner
        self.inner.exec_module(module)
        try:
            from isograd.verify.watched import prepare
        except ImportError as error:
            print(f"isograd verify: cannot watch this process: {error}", file=sys.stderr)
            return
        prepare(os.environ["ISOGRAD_VERIFY"])


def _users_own() -> None:
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("ISOGRAD_VERIFY"):
    sys.meta_path.insert(0, _AfterTorch())
_users_own()
