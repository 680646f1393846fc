"""Writes docs/expected.md from scripts/expected.txt: `python scripts/expected.py`. `make lint` runs it with --check.

"yes" names a test, and the test exists: it is looked up in the source, so this needs neither pytest nor torch. With
--check nothing is written: a test that does not exist, or a page that is not the one this writes, is an error.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS, PAGE = ROOT / "scripts" / "expected.txt", ROOT / "docs" / "expected.md"
STATES = ("yes", "partly", "no")
HEAD = """# What newcomers expect

What people know from accelerate, axolotl, Unsloth, LLaMA-Factory, torchtune, TRL, torchtitan and nanochat (named where
they are best known for it): {yes} of {all} are here, {partly} partly, {no} not. "Yes" means: by a switch, a command or
one documented line, from an installed wheel, and a test runs it. `python scripts/expected.py` writes this page from
`scripts/expected.txt`; `make lint` fails where a test that it names does not exist.

| | expected (best known from) | | test, or what is missing |
|---|---|---|---|
"""


def rows(text: str) -> list[tuple[str, str, str, str]]:
    """(number, expected, state, proof or reason) of each line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split(" | ")) for line in lines]  # type: ignore[misc]


def exists(test: str, root: Path = ROOT) -> bool:
    """Whether a node id, 'tests/x.py::test_name' or a file with tests, is that of a test."""
    file, _, name = test.partition("::")
    if not (root / file).is_file() or not Path(file).name.startswith("test_"):
        return False
    names = {node.name for node in ast.parse((root / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    return name.partition("[")[0] in names if name else any(known.startswith("test_") for known in names)


def mistakes(found: list[tuple[str, str, str, str]], root: Path = ROOT) -> list[str]:
    """What is wrong with the rows, a line each."""
    wrong = [f"a row of {len(row)} columns: {row}" for row in found if len(row) != 4]
    if wrong:
        return wrong
    numbers = [row[0] for row in found]
    wrong = [] if numbers == [str(n + 1) for n in range(len(found))] else [f"numbers {numbers}"]
    wrong += [f"{number}: {state!r} is none of {STATES}" for number, _, state, _ in found if state not in STATES]
    wrong += [
        f"{number}: no test {proof}" for number, _, state, proof in found if state == "yes" and not exists(proof, root)
    ]
    return wrong + [f"{number}: no reason" for number, _, _, proof in found if not proof]


def page(found: list[tuple[str, str, str, str]]) -> str:
    """docs/expected.md."""
    counts = Counter(state for _, _, state, _ in found)
    lines = [
        f"| {number} | {expected} | {state} | {f'`{proof}`' if state == 'yes' else proof} |"
        for number, expected, state, proof in found
    ]
    return HEAD.format(**{state: counts[state] for state in STATES}, all=len(found)) + "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or with --check compare; 1 if something is wrong."""
    found = rows(ROWS.read_text())
    wrong = mistakes(found)
    if not wrong and "--check" not in sys.argv:
        PAGE.write_text(page(found))
    elif not wrong and (not PAGE.exists() or PAGE.read_text() != page(found)):
        wrong = ["docs/expected.md is not of scripts/expected.txt: python scripts/expected.py"]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
