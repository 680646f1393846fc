"""Built-in conversations of real text: what the docstrings of Python's own modules say, and pairs of answers of it.

    What does textwrap.wrap do?      Wrap a single paragraph of text, returning a list of wrapped lines.
    rejected                         the same words in another order

The sources are parsed, not imported. A file that is there is kept, so a run that resumes under another Python has the
samples that it began with.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from isograd.data.files import write_text

WORDS, LONGEST = 5, 110  # of an answer: how few words, how many characters


def conversations(file: Path) -> Path:
    """A question for each docstring, with its first sentence as the answer."""
    if not file.exists():
        chats = ([("user", question), ("assistant", answer)] for question, answer in sentences())
        _write(file, ({"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats))
    return file


def pairs(file: Path) -> Path:
    """Every fourth of the questions, and beside each answer its words in another order."""
    if not file.exists():
        fourth = list(sentences())[::4]
        found = ({"prompt": q, "chosen": answer, "rejected": disordered(answer)} for q, answer in fourth)
        _write(file, (line for line in found if line["rejected"] != line["chosen"]))
    return file


def sentences() -> Iterator[tuple[str, str]]:
    """(question, first sentence of a docstring) of public functions and classes, each sentence once."""
    met = set()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if file.stem.startswith("_"):
            continue
        for name, text in _described(ast.parse(file.read_bytes()), file.stem):
            first = " ".join(text.strip().split("\n\n")[0].split()).split(". ")[0].rstrip(".") + "."
            if len(first.split()) >= WORDS and len(first) <= LONGEST and first.isascii() and first not in met:
                met.add(first)
                yield f"What does {name} do?", first


def _described(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    for part in node.body:
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and not part.name.startswith("_"):
            if text := ast.get_docstring(part):
                yield f"{name}.{part.name}", text
            if isinstance(part, ast.ClassDef):
                yield from _described(part, f"{name}.{part.name}")


def disordered(text: str) -> str:
    """The words of a sentence in the order of their hashes."""
    words = text.split()
    return " ".join(sorted(words, key=lambda word: blake2b(f"{text} {word}".encode(), digest_size=8).digest()))


def _write(file: Path, lines: Iterable[Mapping[str, object]]) -> None:
    write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
