"""The shape of an error: a code, what was wrong, what was seen, what was expected, how to fix it, and where.

isograd's own errors have the same shape (isograd/errors). docs/errors.md lists every code.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar


def plain(text: str) -> str:
    """`text` with control characters, and those that turn the direction of writing, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


class IsogradError(Exception):
    """Every error that isograd or its verifier raises by itself. Without `what` the code's texts in the catalogue are
    filled with `fields`; texts that are given here win."""

    # By code: its texts `what`, `seen`, `expected` and `fix`, with fields in braces.
    catalogue: ClassVar[Callable[[], Mapping[str, Mapping[str, str]]]] = dict
    # Codes of a disk, a machine or a run under way: no mistake in a command line, a config or a file.
    no_mistake: ClassVar[set[str]] = set()

    def __init__(
        self,
        code: str,
        what: str | None = None,
        *,
        seen: object = None,
        expected: object = None,
        fix: str | None = None,
        where: str | None = None,
        **fields: object,
    ) -> None:
        if what is None:
            texts: dict[str, Any] = {"seen": seen, "expected": expected, "fix": fix}
            for label, text in type(self).catalogue()[code].items():
                if texts.get(label) is None:
                    texts[label] = text.format_map(fields)
            what, seen, expected, fix = (texts[label] for label in ("what", "seen", "expected", "fix"))
        self.code, self.what = code, what
        self.seen, self.expected, self.fix, self.where = seen, expected, fix, where
        super().__init__(code, what)

    @property
    def exit_code(self) -> int:
        """Of a command that this error ends: 2 for a mistake in what it was given, 1 for anything else."""
        return 1 if self.code in self.no_mistake else 2

    @property
    def to_print(self) -> BaseException:
        """What a command line prints of it: the error itself, or the one that caused it."""
        return self

    def __str__(self) -> str:
        said = {label: getattr(self, label) for label in ("seen", "expected", "fix", "where")}
        lines = [f"  {label + ':':<10}{value}" for label, value in said.items() if value is not None]
        return plain("\n".join([f"{self.code}: {self.what}", *lines]))  # names of files and tensors may hold anything


class ConfigError(IsogradError):
    """IG6xx: a config or a command line that cannot be read."""


class VerifyError(IsogradError):
    """IG7xx: something the verifier cannot run, read or compare."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)), None)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """' (did you mean x?)', or nothing when no choice is near."""
    choice = nearest(word, choices)
    return f" (did you mean {choice!r}?)" if choice else ""
