"""Errors that teach: a code, what was wrong, what was seen, what was expected, how to fix it, and where.

docs/errors.md is the catalogue; a test holds it to the codes used in the source.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

# Errors of a disk, a machine or a run under way, not of a command line, a config or a file that was given.
_NO_MISTAKE = {
    "IG580", "IG581", "IG583", "IG290", "IG291", "IG292", "IG293", "IG294", "IG295", "IG296", "IG297", "IG299",
    "IG805", "IG904", "IG918", "IG921", "IG928", "IG930", "IG933", "IG940", "IG945", "IG979", "IG980", "IG981", "IG984",
}  # fmt: skip


_ENGINE = re.compile(r"\b[Ee]ngine\b")
_loop: list[str] = []  # what the foreign loop that runs here calls the engine's functions, in one line


def spoken(loop: str, names: Mapping[str, str]) -> None:
    """From now on errors that name a function of the engine say what it is called in `loop`."""
    _loop[:] = [f"in {loop} {', '.join(f'{ours} is {theirs}' for ours, theirs in names.items())}"]


class IsogradError(Exception):
    """Every error that isograd raises by itself: a code, and what was seen, expected, to be done, and where."""

    def __init__(
        self,
        code: str,
        what: str,
        *,
        seen: object = None,
        expected: object = None,
        fix: str | None = None,
        where: str | None = None,
    ) -> None:
        self.code, self.what = code, what
        self.seen, self.expected, self.fix, self.where = seen, expected, fix, where
        self.loop = _loop[0] if _loop and _ENGINE.search(f"{what} {expected} {fix}") else None
        super().__init__(code, what)

    @property
    def exit_code(self) -> int:
        """Of a command that this error ends: 2 for a mistake in what it was given, 1 for anything else."""
        return 1 if self.code in _NO_MISTAKE else 2

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.what}"]
        for label in ("seen", "expected", "fix", "loop", "where"):
            value = getattr(self, label)
            if value is not None:
                lines.append(f"  {label + ':':<10}{value}")
        return "\n".join(lines)


class LayoutError(IsogradError):
    """IG1xx: a layout that contradicts itself or the world."""


class CommError(IsogradError):
    """IG2xx: a collective that cannot be right."""


class LaunchError(CommError):
    """IG25x: local ranks that could not be started, failed, or did not answer.

    `cause`: the error that a rank raised, when it is one of isograd's: the command line prints that one alone.
    """

    cause: IsogradError | None = None

    @property
    def exit_code(self) -> int:
        """That of the cause; 1 for ranks that were killed, crashed or hung."""
        return self.cause.exit_code if self.cause is not None else 1


class NetworkError(CommError):
    """IG29x: machines that do not reach each other, or are not alike."""


class PlanError(IsogradError):
    """IG27x: a program that cannot be rehearsed, or whose rehearsal found it wrong."""


class ContractError(IsogradError):
    """IG3xx: a parameter whose debts are not declared, or declared wrongly."""


class ModelError(IsogradError):
    """IG4xx: a model that cannot be built, sharded or loaded as asked."""


class EngineError(IsogradError):
    """IG5xx: a use of the engine that would give wrong gradients."""


class PipelineError(IsogradError):
    """IG80x: schedules, stages and what passes between them."""


class DoorError(IsogradError):
    """IG85x to IG88x: another library's loop that cannot run on the engine as asked."""


class DataError(IsogradError):
    """IG90x to IG92x: text, token shards and batches."""


class ChatError(DataError):
    """IG99x: conversations, and the chat templates that render them."""


class CheckpointError(IsogradError):
    """IG93x to IG95x: a checkpoint that cannot be written, trusted or fitted."""


class ContrastiveError(IsogradError):
    """IG96x and IG97x: contrastive losses and cached representations."""


class TrainError(IsogradError):
    """IG979, IG98x and IG99x: a run that cannot start or continue."""


class ConfigError(IsogradError):
    """IG6xx: a config or a command line that cannot be read."""


class VerifyError(IsogradError):
    """IG7xx: something the verifier cannot run, read or compare."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was probably meant to be."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """' (did you mean x?)', or nothing when no choice is near."""
    choice = nearest(word, choices)
    return f" (did you mean {choice!r}?)" if choice else ""


def headline(error: BaseException) -> str:
    """The kind of an exception and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
