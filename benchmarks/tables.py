"""Writes a table into a page of docs/, between its markers, and the same into benchmarks/tables/.

    <!-- table: NAME -->
    ...
    <!-- end of table -->

tests/test_benchmarks.py compares both: a table that somebody edited by hand is seen without running what made it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_YET = "not measured yet"
FOLDER = ROOT / "benchmarks" / "tables"
BLOCK = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)\n<!-- end of table -->", re.DOTALL)


def write(page: str, name: str, text: str) -> None:
    """Put `text` into docs/PAGE.md where its markers stand."""
    path = ROOT / "docs" / f"{page}.md"
    old = path.read_text(encoding="utf-8")
    block = f"<!-- table: {name} -->\n{text.strip()}\n<!-- end of table -->"
    new, count = re.subn(rf"<!-- table: {name} -->.*?<!-- end of table -->", lambda _: block, old, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"docs/{page}.md has {count} places for the table {name!r}, expected 1")
    path.write_text(new, encoding="utf-8")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.md").write_text(text.strip() + "\n", encoding="utf-8")


def of_page(text: str) -> dict[str, str]:
    """The tables of a page, by name."""
    return dict(BLOCK.findall(text))
