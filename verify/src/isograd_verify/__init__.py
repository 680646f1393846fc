"""Finds and names gradient bugs in any torch.distributed program: `isograd-verify run -- torchrun ... train.py`.

In the order in which a gradient passes through the folders: watch/ sees it inside the program's own process, record/
holds what was seen, judge/ finds what is wrong without a reference and compare/ with one, tell/ puts it into words.
run/ starts foreign programs and the corpus of known bugs (corpus/). Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0rc1"

if TYPE_CHECKING:
    from isograd_verify.compare.numerics import taylor as taylor
    from isograd_verify.inside import lightning_callback as lightning_callback
    from isograd_verify.inside import trainer_callback as trainer_callback
    from isograd_verify.inside import watching as watching
    from isograd_verify.tell.findings import Finding as Finding
    from isograd_verify.tell.findings import Subject as Subject
    from isograd_verify.tell.report import Report as Report
    from isograd_verify.watch.weighing import weigh as weigh

_HOMES = {
    "Finding": "isograd_verify.tell.findings",
    "Report": "isograd_verify.tell.report",
    "Subject": "isograd_verify.tell.findings",
    "taylor": "isograd_verify.compare.numerics",
    "weigh": "isograd_verify.watch.weighing",
    "lightning_callback": "isograd_verify.inside",
    "trainer_callback": "isograd_verify.inside",
    "watching": "isograd_verify.inside",
}

__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'isograd_verify' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
