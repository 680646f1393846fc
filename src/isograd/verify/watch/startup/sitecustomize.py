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
        where = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
        added = where not in sys.path
        if added:
            sys.path.append(where)  # behind everything: nothing of the program's is to come from there
        try:
            import safetensors.torch  # noqa: F401  (what the capture needs later, now that it can be found)

            from isograd.verify.watch.watched import prepare

            prepare(os.environ["ISOGRAD_VERIFY"])
        except Exception as error:
            print(f"isograd verify: cannot watch this process: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            if added:
                sys.path.remove(where)


def _users_own():  # type: ignore[no-untyped-def]
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("ISOGRAD_VERIFY"):
    sys.meta_path.insert(0, _AfterTorch())
_users_own()  # type: ignore[no-untyped-call]
