"""Writes the table of loops and axes in docs/integrations.md from scripts/loops.txt: `python scripts/loops.py`.

Each cell that says yes names a test, and the test exists (expected.py looks it up in the source); each other one says
why not. `make lint` runs it with --check: then nothing is written, and a page with another table is an error.
"""

from __future__ import annotations

import sys

from expected import ROOT, exists

ROWS, PAGE = ROOT / "scripts" / "loops.txt", ROOT / "docs" / "integrations.md"
AXES = ("dp", "cp", "tp", "ep", "pp")
BEGIN, END = "<!-- scripts/loops.py: begin -->\n", "<!-- end -->\n"
Cells = dict[str, dict[str, str]]  # loop: axis: a test, or "- " and a reason


def cells(text: str) -> Cells:
    """What each line says."""
    found: Cells = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            loop, axes, said = (part.strip() for part in line.split(" | "))
            found.setdefault(loop, {}).update(dict.fromkeys(axes.split(), said))
    return found


def mistakes(found: Cells) -> list[str]:
    """Cells that are missing, tests that do not exist, reasons that are empty."""
    wrong = [f"{loop}: axes {sorted(row)}" for loop, row in found.items() if set(row) != set(AXES)]
    for loop, row in found.items():
        for axis, said in row.items():
            right = len(said) > 2 if said.startswith("-") else exists(said)
            wrong += [] if right else [f"{loop}, {axis}: no test {said}"]
    return wrong


def table(found: Cells) -> str:
    """Yes, with the number of the test below; no, with that of the reason."""
    notes = list(dict.fromkeys(said for row in found.values() for said in row.values()))
    lines = [f"| loop | {' | '.join(AXES)} |", "|---" * (len(AXES) + 1) + "|"]
    for loop, row in found.items():
        said = [f"{'no' if row[axis].startswith('-') else 'yes'} {notes.index(row[axis]) + 1}" for axis in AXES]
        lines.append(f"| {loop} | {' | '.join(said)} |")
    told = [f"{number}. {note[2:] if note.startswith('-') else f'`{note}`'}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *told]) + "\n"


def page(text: str, found: Cells) -> str:
    """docs/integrations.md, with the table between its two marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}{table(found)}{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the page, or with --check compare; 1 if something is wrong."""
    found, text = cells(ROWS.read_text()), PAGE.read_text()
    wrong = mistakes(found)
    if not wrong and "--check" not in sys.argv:
        PAGE.write_text(page(text, found))
    elif not wrong and page(text, found) != text:
        wrong = ["the table of docs/integrations.md is not of scripts/loops.txt: python scripts/loops.py"]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
