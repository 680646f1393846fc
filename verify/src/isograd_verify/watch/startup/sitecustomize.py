"""Python imports this at its start in every process of a watched program: `isograd-verify run` puts its folder first.

It waits until the program has imported torch and either joins a process group or makes an optimizer. The user's own
sitecustomize, if there is one, runs as it would have.
"""

import os
import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))
WHERE = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


@contextmanager
def _found():  # type: ignore[no-untyped-def]
    """The verifier can be imported, from behind everything: nothing of the program's is to come from there."""
    added = WHERE not in sys.path
    if added:
        sys.path.append(WHERE)
    try:
        yield
    finally:
        if added:
            sys.path.remove(WHERE)


def _watch() -> None:
    with _found():
        import safetensors.torch  # noqa: F401  (what the capture needs later, now that it can be found)

        from isograd_verify.watch.watched import prepare

        prepare(os.environ["ISOGRAD_VERIFY"])


def _users_own():  # type: ignore[no-untyped-def]
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("ISOGRAD_VERIFY"):
    with _found():
        from isograd_verify.watch.after_torch import AfterTorch

    AfterTorch(_watch)
_users_own()  # type: ignore[no-untyped-call]
