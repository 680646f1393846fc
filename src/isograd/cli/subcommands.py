"""What the command lines of the commands share: parser, types of options, fields of a config, verbs, sizes in words.

Only argparse is imported here, so that help needs no torch. A command of verbs (`isograd data build ...`) lists them;
each has a description, a function that adds its options to a parser, and one that runs it and returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isograd.errors import ConfigError
from isograd_verify.io import command_line

if TYPE_CHECKING:
    from isograd.train.reading import LoadedConfig

FIELD = re.compile(r"[A-Za-z_][\w.]*=")  # a word that sets a field, unless it is the name of a file
Verb = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


class CommandParser(command_line.Parser):
    """The verifier's, which refuses what no option reads in the words of the verb that was given, and abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, words: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The options."""
        options, extra = self.parse_known_args(words, namespace)
        if extra:
            getattr(options, "parser", self).refuse(extra)
        return options


def run(words: list[str], command: str, about: str, examples: str, verbs: Mapping[str, Verb]) -> int:
    """Parse `words` as a verb of this command with its options, and run it; returns the exit code."""
    parser = CommandParser(
        prog=f"isograd {command}",
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for name, (does, add_options, act) in verbs.items():
        verb = found.add_parser(name, help=does, description=f"isograd {command} {name}: {does}.")
        add_options(verb)
        verb.set_defaults(run=act, parser=verb)
    options = parser.parse_args(words)
    return int(options.run(options))


def number(least: float, most: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """The type of an option: a whole number, or a float, between two bounds."""

    def parsed(text: str) -> Any:
        try:
            value = kind(text[:30])
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what} from {least} to {most}")
        return value

    return parsed


def in_bytes(count: float) -> str:
    """Bytes in words: '1.23 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def parse_fields(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the parser's own options, the words that set fields of the config)."""
    own = parser._option_string_actions
    mine, dotted, rest, given = [], [], list(words), set[str]()
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and word.partition("=")[0] not in own:
            dotted.append(word)
            if "=" not in word and rest:
                dotted.append(rest.pop(0))
        elif FIELD.match(word) and not os.path.exists(word):
            dotted.append(word)
        else:
            mine.append(word)
            name = word.partition("=")[0]
            if name in own and name in given:
                raise ConfigError("IG600", f"{name} is given twice", expected="each option once")
            given.add(name)
            if word in own and own[word].nargs is None and rest:
                mine.append(rest.pop(0))
    return parser.parse_args(mine), dotted


def load_config(path: str, dotted: list[str], parser: argparse.ArgumentParser) -> LoadedConfig:
    """The config in a file with these words over it; a word that names no field may mean an option of the parser."""
    from isograd.train.reading import load

    return load(path, dotted, [name.removeprefix("--") for name in parser._option_string_actions])
