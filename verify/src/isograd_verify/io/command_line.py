"""What the command lines of isograd and of its verifier share: a parser whose errors teach, and exit codes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from isograd_verify.errors import ConfigError, IsogradError, did_you_mean
from isograd_verify.io import terminal


class Parser(argparse.ArgumentParser):
    """argparse that raises its errors as IsogradErrors, with the nearest word where one was misspelled."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found."""
        word = re.search(r"COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        hint = did_you_mean(word[1], re.findall(r"[\w-]+", word[2])) if word else ""
        raise ConfigError("IG600", f"{message}{hint}", fix=f"see '{self.prog} --help'")

    def format_help(self) -> str:
        """The help text, no line wider than the terminal."""
        return terminal.fold(super().format_help(), terminal.width())

    def refuse(self, extra: list[str]) -> NoReturn:
        """Raise for arguments that no option reads: unknown options with the nearest name, words that lack quotes."""
        names = re.findall(r"--[a-z-]+", self.format_help())
        options = [word.partition("=")[0] for word in extra if word.startswith("-")]
        hints = [f"unknown option {word!r}{did_you_mean(word, names)}" for word in options]
        problem = "; ".join(hints) or f"unexpected {' '.join(extra)!r}: a layout of several words needs quotes"
        raise ConfigError("IG600", problem, fix=f"see '{self.prog} --help'")


def exit_code(command: Callable[[], int]) -> int:
    """Run a command; its exit code. An IsogradError is printed without a traceback, and the code is its own."""
    try:
        code = command()
        sys.stdout.flush()  # here, where a reader that has left is no error
        return code
    except IsogradError as error:
        print(terminal.plain(str(error.to_print)), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:  # Ctrl-C: 128 and the signal's number, as shells say
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough: ... | head. 128 and SIGPIPE's number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
