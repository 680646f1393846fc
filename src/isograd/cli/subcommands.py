"""What the command lines of the commands share: their parser, types of options, and commands made of verbs.

Only argparse is imported here, so that help needs no torch. A command of verbs (`isograd data build ...`) lists them;
each has a description, a function that adds its options to a parser, and one that runs it and returns the exit code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isograd_verify.io import command_line

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
