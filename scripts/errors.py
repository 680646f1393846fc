"""Writes docs/errors.md: `python scripts/errors.py`. `make test` compares the page with what this writes.

The row of a code in src/isograd/errors is made of its texts, a field as its name in capitals. The rows
of other codes are kept as they are in the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
ROW = re.compile(r"^\| `(IG\d{3})` \| .* \|$")
FIELD = re.compile(r"\{(\w+)[^{}]*\}")


def page(before: str, catalogue: dict[str, dict[str, str]]) -> str:
    """The page as it has to be, given the page as it is."""
    lines = before.rstrip("\n").split("\n")
    rows = {match[1]: line for line in lines if (match := ROW.match(line))}
    head = [line for line in lines if not ROW.match(line)]
    rows |= {code: _row(code, texts) for code, texts in catalogue.items()}
    return "\n".join([*head, *(rows[code] for code in sorted(rows))]) + "\n"


def _row(code: str, texts: dict[str, str]) -> str:
    to_do = texts.get("fix") or (f"expected: {texts['expected']}" if "expected" in texts else "see the message")
    return f"| `{code}` | {_cell(texts['what'])} | {_cell(to_do)} |"


def _cell(text: str) -> str:
    """A text of the catalogue as Markdown."""
    text = FIELD.sub(lambda match: match[1].upper(), re.sub(r"\{\{.*?\}\}|<[^>]*>", r"`\g<0>`", text))
    return text.replace("{{", "{").replace("}}", "}").replace("|", r"\|").replace("*.", r"\*.")


if __name__ == "__main__":
    sys.path[:0] = [str(PAGE.parents[1] / tree) for tree in ("src", "verify/src")]
    from isograd.errors import catalogue

    PAGE.write_text(page(PAGE.read_text(), catalogue()))
