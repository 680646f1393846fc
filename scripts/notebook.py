"""docs/tutorial.ipynb from docs/tutorial.md: text is text, and each block of commands that the page runs is a cell.

python scripts/notebook.py            write it
python scripts/notebook.py --check    fail where it is not what the page says
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "tutorial.ipynb"
BLOCK = re.compile(r"<!-- run -->\n```\n(.*?)\n```\n", re.DOTALL)


def cells(page: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell: "markdown", or "code" whose lines are commands of a shell."""
    parts = BLOCK.split(page)
    return [
        ("code" if number % 2 else "markdown", part.strip("\n")) for number, part in enumerate(parts) if part.strip()
    ]


def notebook(page: str) -> str:
    """The notebook's text. Its commands are those of a shell, which runs a cell as a whole."""
    made = []
    for number, (kind, source) in enumerate(cells(page)):
        text = f"%%bash\n{source}" if kind == "code" else source
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        made.append({**cell, "execution_count": None, "outputs": []} if kind == "code" else cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def main() -> int:
    """Write the notebook, or compare it; 1 if it is stale."""
    text = notebook(PAGE.read_text(encoding="utf-8"))
    if "--check" in sys.argv:
        stale = not NOTEBOOK.is_file() or NOTEBOOK.read_text(encoding="utf-8") != text
        print("docs/tutorial.ipynb is stale: python scripts/notebook.py\n" if stale else "", end="")
        return int(stale)
    NOTEBOOK.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
