"""The line of the program from which something was called."""

from __future__ import annotations

import os
import sys

import torch

from isograd_verify.watch.foreign import ENGINE

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CORPUS = os.path.join(_OURS, "corpus")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_WRAPS = "typing_extensions.py"  # stands around functions of torch that are deprecated


def call_site(base: str) -> str:
    """'train.py:33 in step': the nearest frame that is neither torch's nor isograd's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        mine = (file.startswith(_OURS) and not file.startswith(_CORPUS)) or ENGINE.search(file)
        if not (mine or file.startswith((_TORCH, "<")) or "contextlib" in file or file.endswith(_WRAPS)):
            shown = os.path.relpath(file, base) if file.startswith(base) else os.path.basename(file)
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
