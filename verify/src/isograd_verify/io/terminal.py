"""How wide output may be (the terminal, or COLUMNS), lines folded to that, and text of others that cannot move it."""

from __future__ import annotations

import os
import re
import sys
import textwrap

from isograd_verify.errors import plain

__all__ = ["NARROWEST", "fold", "plain", "width"]
NARROWEST = 40


def width(otherwise: int = 120) -> int:
    """Columns to write: COLUMNS, else the terminal's, else `otherwise`."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said[:9]) > 0:
        return max(NARROWEST, int(said[:9]))
    for stream in (sys.stdout, sys.stderr):
        try:
            return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns or otherwise)
        except (OSError, ValueError, AttributeError):  # not a terminal, or no file at all
            continue
    return otherwise


def fold(text: str, columns: int) -> str:
    """`text` with every longer line broken at spaces; what follows is indented as the line's second word or column."""
    folded: list[str] = []
    for line in text.split("\n"):
        column = re.match(r"\s*\S+(?: \S+)*?\s{2,}(?=\S)", line)  # 'label   text': text continues under itself
        indent = len(column[0]) if column else len(line) - len(line.lstrip())
        under = " " * (indent if indent <= columns // 2 else 2)
        broken = textwrap.TextWrapper(
            columns, subsequent_indent=under, replace_whitespace=False, tabsize=4, break_on_hyphens=False
        )
        folded += [line] if len(line) <= columns else broken.wrap(line)
    return "\n".join(folded)
