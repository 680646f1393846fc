"""Commands made of verbs: `isograd data build ...`, `isograd ckpt verify ...`.

Only argparse is imported here, so that help needs no torch. A command lists its verbs; each verb has a description, a
function that adds its options to a parser, and a function that runs it and returns the exit code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

Parser = type[argparse.ArgumentParser]
Verb = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def run(words: list[str], kind: Parser, room: str, about: str, examples: str, verbs: Mapping[str, Verb]) -> int:
    """Parse `words` as a verb of this room with its options, and run it; returns the exit code."""
    parser = kind(
        prog=f"isograd {room}",
        description=about,
        epilog=examples,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for name, (does, add_options, act) in verbs.items():
        verb = found.add_parser(name, help=does, description=f"isograd {room} {name}: {does}.", allow_abbrev=False)
        add_options(verb)
        verb.set_defaults(run=act, parser=verb)
    options, extra = parser.parse_known_args(words)
    if extra:
        options.parser.refuse(extra)
    return int(options.run(options))
