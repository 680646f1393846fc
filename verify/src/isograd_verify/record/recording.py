"""A recording: what a program did, as files (docs/verify.md, what is recorded). Written rank by rank while it runs,
read afterwards by the checks. Nothing is unpickled, every read is bounded, a file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isograd_verify.errors import IsogradError, VerifyError
from isograd_verify.io.untrusted import FileError, open_to_read, parse_json, read_header, read_json
from isograd_verify.record.events import Collective, End, Event, line, read

VERSION = 4  # 1 had untyped events, 2 other names of their kinds, 3 fields that no check has read
STEPS = "steps"  # eight bytes: the optimizer steps of a rank that is still under way
WEIGHTS = "weights-{:04d}.safetensors"  # all weights, whole, with which a step began (run/beside.py)
BEHIND = "behind-{:04d}.safetensors"  # what modules carry behind a backward that was done again (watch/feed.py)
MOST_EVENTS = 5_000_000
LONGEST_LINE = 1 << 24
LONGEST_JSON = 1 << 28
MOST_RANKS = 1 << 20
STEP = re.compile(r"step-(\d{1,9})\.safetensors")

Kind = TypeVar("Kind", bound=Event)


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1))
    os.replace(partial, path)


def describe(directory: Path, **about: Any) -> None:
    """Writes recording.json: the layout, and whatever else is known of the run."""
    write_json(directory / "recording.json", {"version": VERSION, **about})


DAMAGED = "the recording is truncated, damaged or not whole: record again"


@contextmanager
def _damage(refusal: Callable[[str], VerifyError]) -> Iterator[None]:
    """What cannot be read is one error of a recording, made of why."""
    try:
        yield
    except (FileError, ValueError, OSError, SafetensorError) as error:
        raise refusal(error.brief if isinstance(error, FileError) else str(error) or repr(error)) from error


class RankWriter:
    """One rank's part of a recording, while its program runs."""

    def __init__(self, directory: Path, rank: int, world: int) -> None:
        self.path = directory / f"rank-{rank:04d}"
        self.path.mkdir(parents=True, exist_ok=True)
        self.about: dict[str, Any] = {"version": VERSION, "rank": rank, "world": world, "finished": False}
        self._events = open(self.path / "events.jsonl", "w", buffering=1)  # noqa: SIM115 (a line reaches the file at once)
        self.save_about()

    def event(self, event: Event) -> None:
        """Appends one event; it reaches the file at once."""
        self._events.write(line(event))

    def tensors(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Writes the tensors of a step, whole or not at all."""
        path = self.path / f"step-{step:04d}.safetensors"
        partial = path.with_name(path.name + ".partial")
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial)
        os.replace(partial, path)

    def save_about(self) -> None:
        """Writes rank.json anew."""
        write_json(self.path / "rank.json", self.about)

    def close(self) -> None:
        """Marks this rank's part as finished."""
        self.about["finished"] = True
        self._events.close()
        self.save_about()


@dataclass
class RankRecord:
    """One rank's part of a recording, read."""

    path: Path
    about: dict[str, Any]
    events: list[Event]
    _steps: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return int(self.about["rank"])

    @property
    def steps(self) -> list[int]:
        """The optimizer steps that were written."""
        return sorted(int(found[1]) for p in self.path.iterdir() if (found := STEP.fullmatch(p.name)))

    def of(self, kind: type[Kind], step: int | None = None) -> list[Kind]:
        """The events of one kind, in order; of one optimizer step, or of all."""
        return [e for e in self.events if isinstance(e, kind) and (step is None or e.step == step)]

    def tensors(self, step: int) -> dict[str, Tensor]:
        """'gradient/NAME', 'parameter/NAME', 'after/NAME', 'final/NAME', 'part/MICRO/NAME', ... of one step."""
        if step not in self._steps:
            self._steps[step] = load(self.path / f"step-{step:04d}.safetensors")
        return self._steps[step]

    def forget(self, step: int) -> None:
        """Lets go of the tensors of a step, which are read again when they are asked for."""
        self._steps.pop(step, None)

    def group(self, step: int, prefix: str) -> dict[str, Tensor]:
        """The tensors of a step under 'prefix/', by the rest of their names."""
        return {k[len(prefix) + 1 :]: t for k, t in self.tensors(step).items() if k.startswith(prefix + "/")}


class Recording:
    """A recording read from its directory; refuses what is truncated, missing or from a newer version."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            fix = "record one with: isograd-verify run --record DIR -- COMMAND"
            raise VerifyError("IG711", f"no recording at {str(path)!r}", expected="a directory", fix=fix)
        found = sorted(p for p in self.path.glob("rank-*") if p.is_dir())
        if not found:
            raise VerifyError(
                "IG712",
                f"the recording {str(path)!r} holds no rank",
                expected="rank-0000 and so on, one directory per rank",
                fix="the program may have ended before its first collective, model call or optimizer step",
            )
        self.ranks = [_read_rank(directory) for directory in found]
        self.world = int(self.ranks[0].about["world"])
        held = [record.rank for record in self.ranks]
        if len(held) != self.world or held != list(range(self.world)):
            raise VerifyError(
                "IG713",
                f"the recording {str(path)!r} is not whole",
                seen=f"ranks {held}",
                expected=f"ranks 0 to {self.world - 1}",
                fix="several nodes: isograd-verify merge WHOLE PART ..., each PART what --record left on one of them",
            )

    @cached_property
    def about(self) -> dict[str, Any]:
        """recording.json: the command, the layout, and how the program ended."""
        path = self.path / "recording.json"
        return _read_json(path) if path.exists() else {}

    @property
    def steps(self) -> list[int]:
        """Steps that every rank recorded."""
        return sorted(set.intersection(*(set(record.steps) for record in self.ranks)))


def merge(whole: Path, parts: list[Path]) -> None:
    """Copies the ranks of several recordings, of one run on several nodes, into a new one."""
    if whole.exists():
        raise VerifyError("IG702", f"{str(whole)!r} is there already", expected="a new directory for the recording")
    held: dict[str, Path] = {}
    for part in parts:
        ranks = [home for home in sorted(part.glob("rank-*")) if home.is_dir()]
        if not ranks:
            raise VerifyError("IG712", f"the recording {str(part)!r} holds no rank", expected="what --record has left")
        twice = next((home for home in ranks if home.name in held), None)
        if twice is not None:
            raise VerifyError(
                "IG728", f"{twice.name} is in two of the recordings", seen=f"{held[twice.name].parent} and {part}",
                expected="recordings of different ranks of one run",
            )  # fmt: skip
        held |= {home.name: home for home in ranks}
    for name, home in held.items():
        (whole / name).mkdir(parents=True)
        for file in home.iterdir():
            if file.is_file() and not file.is_symlink():
                shutil.copyfile(file, whole / name / file.name)
    about = _read_json(parts[0] / "recording.json") if (parts[0] / "recording.json").exists() else {"version": VERSION}
    write_json(whole / "recording.json", about)


def ranks_so_far(path: Path) -> dict[Path, dict[str, Any]]:
    """rank.json of each rank of a recording that may still be written, by its folder."""
    return {about.parent: _read_json(about) for about in sorted(path.glob("rank-*/rank.json"))}


def _read_rank(directory: Path) -> RankRecord:
    about = _read_json(directory / "rank.json", {"version": 1 << 31, "rank": MOST_RANKS, "world": MOST_RANKS})
    version = about["version"]
    if version != VERSION:
        raise VerifyError(
            "IG714",
            f"{directory.name} of the recording was written by another version of isograd",
            seen=f"version {version}",
            expected=f"version {VERSION}",
            fix="read it with the isograd that wrote it, or record again",
        )
    events: list[Event] = []
    path, what = directory / "events.jsonl", "a recording's list of events cannot be read to its end"
    here = f"{path.name} of {directory.name}"

    def refusal(why: str) -> VerifyError:
        seen = f"{here}, line {len(events) + 1}: {why}"
        return VerifyError("IG715", what, seen=seen, expected="one JSON object per line", fix=DAMAGED)

    with _damage(refusal), open_to_read(path) as lines:
        while text := lines.readline(LONGEST_LINE):
            if len(events) >= MOST_EVENTS:
                raise ValueError(f"more than {MOST_EVENTS} events")
            if not text.endswith(b"\n"):
                raise ValueError("a line is cut short")
            events.append(read(parse_json(text, path, nan=True)))
    # A collective's duration is known only after it: put each End into its Collective.
    took = {event.n: event.seconds for event in events if isinstance(event, End)}
    told = (replace(e, seconds=took.get(e.n)) if isinstance(e, Collective) else e for e in events)
    return RankRecord(directory, about, [event for event in told if not isinstance(event, End)])


def _read_json(path: Path, needed: dict[str, int] | None = None) -> dict[str, Any]:
    """needed: whole numbers that must stand in it, from 0 to below the one given."""

    def refusal(why: str) -> VerifyError:
        what, seen = f"{path.name} of a recording cannot be read", f"{path.parent.name}: {why}"
        return VerifyError("IG716", what, seen=seen, expected="a JSON object", fix=DAMAGED)

    with _damage(refusal):
        data = read_json(path, LONGEST_JSON, nan=True)
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        lacking = [k for k, most in (needed or {}).items() if type(data.get(k)) is not int or not 0 <= data[k] < most]
        if lacking:
            raise ValueError(f"no number under {', '.join(lacking)}, or none that can be")
    return data


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of one file of a recording."""
    what, here = "the tensors of a recorded step cannot be read", f"{path.name} of {path.parent.name}"

    def refusal(why: str) -> VerifyError:
        return VerifyError("IG717", what, seen=f"{here}: {why}", expected="a whole safetensors file", fix=DAMAGED)

    with _damage(refusal):
        names = read_header(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}


@contextmanager
def consistent(*recordings: Recording) -> Iterator[None]:
    """While recordings from outside are compared: files that contradict one another are an error, not a traceback."""
    try:
        yield
    except IsogradError:
        raise
    except Exception as error:
        raise VerifyError(
            "IG718",
            "the recordings contradict themselves",
            seen=f"{type(error).__name__}: {str(error)[:300]}",
            expected=f"{' and '.join(str(r.path) for r in recordings)} as they were recorded",
            fix="record again; if that ends in the same error, please report it with both recordings",
        ) from error
