"""A recording: what a program did, as files. Written rank by rank while it runs, read afterwards by the checks.

    DIR/recording.json          version, command, how it ended (written by whoever started the program)
    DIR/rank-0003/rank.json     who this rank is, what it saw of the program; "finished" is false until the end
    DIR/rank-0003/events.jsonl  one line per event, in order (see capture.py for the kinds)
    DIR/rank-0003/steps         how many optimizer steps it has taken, while it runs (see watched.py)
    DIR/rank-0003/step-0001.safetensors   gradients, parameters, sketches and activations of one optimizer step

JSON and safetensors only: nothing is unpickled, every read is bounded, a file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isograd.errors import VerifyError

VERSION = 1
STEPS = "steps"  # eight bytes: the optimizer steps of a rank that is still under way
MOST_EVENTS = 5_000_000
LONGEST_LINE = 1 << 24
LONGEST_JSON = 1 << 28

Event = dict[str, Any]


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1))
    os.replace(partial, path)


class RankWriter:
    """One rank's part of a recording, while its program runs."""

    def __init__(self, directory: Path, rank: int, world: int) -> None:
        self.path = directory / f"rank-{rank:04d}"
        self.path.mkdir(parents=True, exist_ok=True)
        self.about: dict[str, Any] = {"version": VERSION, "rank": rank, "world": world, "finished": False}
        self._events = open(self.path / "events.jsonl", "w", buffering=1)  # noqa: SIM115 (a line reaches the file at once)
        self.save_about()

    def event(self, event: Event) -> None:
        self._events.write(json.dumps(event, separators=(",", ":")) + "\n")

    def tensors(self, step: int, tensors: dict[str, Tensor]) -> None:
        path = self.path / f"step-{step:04d}.safetensors"
        partial = path.with_name(path.name + ".partial")
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial)
        os.replace(partial, path)

    def save_about(self) -> None:
        write_json(self.path / "rank.json", self.about)

    def close(self) -> None:
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
        return int(self.about["rank"])

    @property
    def steps(self) -> list[int]:
        return sorted(int(p.stem.partition("-")[2]) for p in self.path.glob("step-*.safetensors"))

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["k"] == kind]

    def tensors(self, step: int) -> dict[str, Tensor]:
        """'gradient/NAME', 'parameter/NAME', 'after/NAME', 'final/NAME', 'part/MICRO/NAME', ... of one step."""
        if step not in self._steps:
            self._steps[step] = _load(self.path / f"step-{step:04d}.safetensors")
        return self._steps[step]

    def group(self, step: int, prefix: str) -> dict[str, Tensor]:
        """The tensors of a step under 'prefix/', by the rest of their names."""
        return {k[len(prefix) + 1 :]: t for k, t in self.tensors(step).items() if k.startswith(prefix + "/")}


class Recording:
    """A recording read from its directory; refuses what is truncated, missing or from a newer version."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            fix = "record one with: isograd verify run --record DIR -- COMMAND"
            raise VerifyError("IG711", f"no recording at {str(path)!r}", expected="a directory", fix=fix)
        found = sorted(self.path.glob("rank-*"))
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
        if held != list(range(self.world)):
            raise VerifyError(
                "IG713",
                f"the recording {str(path)!r} is not whole",
                seen=f"ranks {held}",
                expected=f"ranks 0 to {self.world - 1}",
                fix="copy the directories of all ranks into one place before comparing",
            )

    @cached_property
    def about(self) -> dict[str, Any]:
        path = self.path / "recording.json"
        return _read_json(path) if path.exists() else {}

    @property
    def steps(self) -> list[int]:
        """Steps that every rank recorded."""
        return sorted(set.intersection(*(set(record.steps) for record in self.ranks)))

    def parameters(self, rank: int = 0) -> dict[str, Event]:
        """What a rank told of its parameters at its first optimizer step: shape, box, trainable, owned."""
        steps = self.ranks[rank].of("step")
        return dict(steps[0]["parameters"]) if steps else {}


def _read_rank(directory: Path) -> RankRecord:
    about = _read_json(directory / "rank.json", ("version", "rank", "world"))
    version = about["version"]
    if version > VERSION:
        raise VerifyError(
            "IG714",
            f"{directory.name} of the recording was written by a newer isograd",
            seen=f"version {version}",
            expected=f"version {VERSION} or older",
            fix="read it with the isograd that wrote it, or record again",
        )
    events: list[Event] = []
    path = directory / "events.jsonl"
    try:
        with open(path, encoding="utf-8") as lines:
            while line := lines.readline(LONGEST_LINE):
                if len(events) >= MOST_EVENTS:
                    raise ValueError(f"more than {MOST_EVENTS} events")
                event = json.loads(line) if line.endswith("\n") else None
                if not isinstance(event, dict) or "k" not in event:
                    raise ValueError("a line is cut short or is no event")
                events.append(event)
        joined = _joined(events)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise VerifyError(
            "IG715",
            "a recording's list of events cannot be read to its end",
            seen=f"{path.name} of {directory.name}, line {len(events) + 1}: {error}",
            expected="one JSON object per line",
            fix="the file is truncated or damaged: record again",
        ) from error
    return RankRecord(directory, about, joined)


def _joined(events: list[Event]) -> list[Event]:
    """A collective's duration is known only after it: fold each 'end' into its collective."""
    by_number: dict[int, Event] = {}
    kept = []
    for event in events:
        if event["k"] == "end":
            by_number.get(event["n"], {})["seconds"] = event["seconds"]
            continue
        if event["k"] == "collective":
            by_number[event["n"]] = event
        kept.append(event)
    return kept


def _read_json(path: Path, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    try:
        if path.stat().st_size > LONGEST_JSON:
            raise ValueError(f"larger than {LONGEST_JSON} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        lacking = [key for key in needed if not isinstance(data.get(key), int)]
        if lacking:
            raise ValueError(f"no number under {', '.join(lacking)}")
    except (OSError, ValueError, RecursionError) as error:
        raise VerifyError(
            "IG716",
            f"{path.name} of a recording cannot be read",
            seen=f"{path.parent.name}: {error}",
            expected="a JSON object",
            fix="the recording is truncated or damaged: record again",
        ) from error
    return data


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise VerifyError(
            "IG717",
            "the tensors of a recorded step cannot be read",
            seen=f"{path.name} of {path.parent.name}: {error}",
            expected="a whole safetensors file",
            fix="the file is truncated or missing: record again",
        ) from error
