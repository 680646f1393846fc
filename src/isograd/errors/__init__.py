"""Errors that teach: a code, what was wrong, what was seen, what was expected, how to fix it, and where.

Their shape is the verifier's (isograd_verify/errors.py). texts.py has the texts of a code, with named fields; a call
site gives the fields, and what was seen if the catalogue does not say it:

    raise DataError("IG912", seen="byte 0xff at place 3", path=path, line=1)

Other call sites give the texts themselves. `python scripts/errors.py` writes docs/errors.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from isograd_verify.errors import ConfigError, IsogradError, VerifyError, did_you_mean, nearest

__all__ = ["ConfigError", "IsogradError", "VerifyError", "did_you_mean", "nearest"]  # and what is defined here

# Errors of a disk, a machine or a run under way, not of a command line, a config or a file that was given.
IsogradError.no_mistake |= {
    "IG213", "IG580", "IG581", "IG583", "IG290", "IG291", "IG292", "IG293", "IG295", "IG297", "IG299",
    "IG805", "IG904", "IG918", "IG921", "IG928", "IG930", "IG933", "IG940", "IG945", "IG979", "IG980", "IG981", "IG984",
}  # fmt: skip


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

    @property
    def to_print(self) -> BaseException:
        """The cause alone, when it is one of isograd's."""
        return self.cause or self


class NetworkError(CommError):
    """IG29x: machines that do not reach each other, or are not alike."""


class PlanError(IsogradError):
    """IG27x: a program that cannot be rehearsed, or whose rehearsal found it wrong."""


class ContractError(IsogradError):
    """IG3xx: a parameter whose contract is missing or wrong."""


class ModelError(IsogradError):
    """IG4xx: a model that cannot be built, sharded or loaded as asked."""


class EngineError(IsogradError):
    """IG5xx: a use of the engine that would give wrong gradients."""


class PipelineError(IsogradError):
    """IG80x: schedules, stages and what passes between them."""


class IntegrationError(IsogradError):
    """IG85x to IG88x: another library's loop that cannot run on the engine as asked."""


class DataError(IsogradError):
    """IG90x to IG92x: text, token shards and batches.

    `reason`: of a line of conversations that a build may leave out; lines of one reason are counted together.
    """

    reason = ""


class ChatError(DataError):
    """IG99x: conversations, and the chat templates that render them."""


class CheckpointError(IsogradError):
    """IG93x to IG95x: a checkpoint that cannot be written, trusted or fitted."""


class ContrastiveError(IsogradError):
    """IG96x and IG97x: contrastive losses and cached representations."""


class TrainError(IsogradError):
    """IG979, IG98x and IG99x: a run that cannot start or continue."""


def listed(parts: Sequence[str], most: int, between: str = ", ") -> str:
    """'a, b and 4 more'."""
    more = f"{between.rstrip(', ')} and {len(parts) - most} more" if len(parts) > most else ""
    return between.join(parts[:most]) + more


def headline(error: BaseException) -> str:
    """The kind of an exception and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@contextmanager
def if_not_installed(absent: Callable[[ImportError], IsogradError]) -> Iterator[None]:
    """Around the import of a package that an extra brings: what to raise where it is not there."""
    try:
        yield
    except ImportError as error:
        raise absent(error) from error


@cache
def catalogue() -> dict[str, dict[str, str]]:
    """By code: its texts `what`, `seen`, `expected` and `fix`, with fields in braces."""
    from isograd.errors import texts, texts_of_engine

    found: dict[str, dict[str, str]] = {}
    for line in (texts.TEXTS.strip() + texts_of_engine.TEXTS.rstrip()).replace("\n" + 12 * " ", " ").split("\n"):
        label, text = line.split(":", 1)
        if label.startswith("IG"):
            found[label] = entry = {"what": text.strip()}
        else:
            entry[label.strip()] = text.strip()
    return found


IsogradError.catalogue = catalogue
