"""What people look at during a run: one line per step, and the same numbers in metrics.jsonl.

metrics.jsonl is always written, one object a line. A resumed run continues it from the step it resumed at: lines of
steps that will be done again are dropped, so that a curve has one value at each step.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isograd.io import atomic, no_follow, terminal, untrusted
from isograd.io.plots import Curve, Points
from isograd.train.run_folder import writing

if TYPE_CHECKING:
    from isograd.engine import Mean

MAX_LINE = 1 << 16
NAMED = ("step", "event", "loss", "weight", "unit")  # of an evaluation; its other numbers are measures of its task
WIDE = 10_000  # columns where nothing limits a line: a file, a pipe


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal. What is no line of a journal, as the last one after a kill, is left out."""
    if not os.path.lexists(file):
        return
    with untrusted.open_to_read(file) as opened:
        while line := opened.readline(MAX_LINE):
            try:
                found = untrusted.parse_json(line, file)
            except untrusted.FileError:
                continue
            if isinstance(found, dict) and _is_entry(found):
                yield found


def _is_entry(line: dict[str, Any]) -> bool:
    """Whether a line has the types that readers of journals rely on."""
    step, event, loss = line.get("step", 0), line.get("event"), line.get("loss")
    numbers = loss is None or (isinstance(loss, int | float) and not isinstance(loss, bool))
    return (
        type(step) is int
        and (event is None or isinstance(event, str))
        and numbers
        and (event is not None or "step" in line)
    )


def curve(file: Path) -> Curve:
    """Losses and what evaluations measured, of a run's journal."""
    training, held_out, measures = Points(), Points(), dict[str, Points]()
    for line in read(file):
        evaluation, loss = line.get("event") == "evaluation", line.get("loss")
        if loss is not None and (evaluation or "event" not in line):
            (held_out if evaluation else training).append((line["step"], loss))
        for name, value in line.items() if evaluation else ():
            if name not in NAMED and isinstance(value, int | float):
                measures.setdefault(name, []).append((line["step"], value))
    return Curve(training, held_out, measures)


PATIENCE = 1 << 20  # bytes of lines that wait
RESTART = "restart"  # the event of a death, which is kept when a run begins from its first step again


def _sum_of(lines: list[dict[str, Any]], name: str) -> float:
    return sum(value for line in lines if isinstance(value := line.get(name), float))


class Journal:
    """On the first rank only. Each of `sinks` shows a line to somebody. `patient`: lines wait for room on the disk."""

    def __init__(
        self, file: Path, resumed_at: int, sinks: list[Callable[[dict[str, Any]], None]], patient: bool = False
    ) -> None:
        before = list(read(file))
        kept = [line for line in before if line.get("step", 0) <= resumed_at]
        if not resumed_at:
            kept = [line for line in kept if line.get("event") == RESTART]
        with writing():
            atomic.replace_text(file, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = no_follow.open_to_write(file, "ab", buffering=0)
        self._sinks, self._most, self._waits = sinks, PATIENCE if patient else 0, b""
        self._resumed_at, self._again = resumed_at, max(line.get("step", 0) for line in [{}, *before]) - resumed_at
        self._worked_s, self._lost_s = _sum_of(kept, "seconds"), _sum_of(kept, "lost_s")
        self._again_s = _sum_of(before, "seconds") - self._worked_s

    def write(self, **entry: Any) -> None:
        """Append an entry to metrics.jsonl and show it."""
        self._waits += json.dumps({k: _number(v) for k, v in entry.items()}, allow_nan=False).encode() + b"\n"
        with writing():
            try:
                self._put()
            except OSError:
                if len(self._waits) > self._most:
                    raise
        for sink in self._sinks:
            sink(entry)

    def restarted(self, seconds: float) -> None:
        """Ranks have died, and the state is loaded again `seconds` after the first sign of it: tell what was lost."""
        steps, lost_s = max(0, self._again), seconds + self._again_s
        text = f"restarted: {steps} steps are done again, {lost_s:.1f} s are lost"
        self._lost_s += lost_s
        self.write(step=self._resumed_at, event=RESTART, text=text, lost_steps=steps, lost_s=lost_s)

    def worked(self, seconds: float) -> dict[str, float]:
        """After steps that took so long: that, and their share in the run's time of steps and losses."""
        self._worked_s += seconds
        return {"seconds": seconds, "goodput": self._worked_s / (self._worked_s + self._lost_s)}

    def _put(self) -> None:
        while self._waits:
            self._waits = self._waits[self._file.write(self._waits) :]

    def close(self) -> None:
        """On a full disk this fails once more, and would hide the error that said so."""
        with suppress(OSError), self._file:
            self._put()


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity; null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def human(count: float) -> str:
    """1234567 -> '1.23M'."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def clock(seconds: float) -> str:
    """3723 -> '1:02:03'."""
    hours, rest = divmod(int(seconds + 0.5), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def of_terms(terms: Mapping[str, Mean]) -> dict[str, float]:
    """The numbers of a step of several terms: 'loss/balance' is the mean of one, 'weight/balance' what it is over."""
    means = {f"loss/{name}": term.mean for name, term in terms.items()}
    return means | {f"weight/{name}": term.weight for name, term in terms.items()}


def sentence(entry: dict[str, Any], columns: int = WIDE) -> str:
    """A line of the journal in words; of a step, as many of its numbers as fit. metrics.jsonl has all of them."""
    if entry.get("event") == "evaluation":
        more = "".join(f"  {name} {value:.4f}" for name, value in entry.items() if name not in NAMED)
        about = f"over {human(entry['weight'])} {entry['unit']}"
        return f"step {entry['step']:>5}  held-out loss {entry['loss']:.4f} {about}{more}"
    if "event" in entry:
        return f"step {entry['step']:>5}  {terminal.plain(entry['text'])}"
    whole = f"{human(entry['per_s'])} {entry['unit']}/s"
    parts = {
        "step": f"step {entry['step']:>5}/{entry['steps']}",
        "loss": f"loss {entry['loss']:.4f}",
        "terms": "  ".join(f"{name[5:]} {value:.4f}" for name, value in entry.items() if name.startswith("loss/")),
        "norm": f"grad norm {entry['grad_norm']:.3f}",
        "lr": f"lr {entry['lr']:.2e}",
        "speed": f"{whole} ({human(entry['per_s_rank'])} per rank)",
        "mfu": f"mfu {entry['mfu']:.1%}" if entry.get("mfu") is not None else "",
        "memory": f"mem {entry['memory_gb']:.2f} GB",
        "data": f"data {entry['data_wait']:.0%}",
        "experts": spread(entry.get("load", {})),
        "eta": f"ETA {clock(entry['eta_s'])}",
        "skipped": "SKIPPED" if entry.get("skipped") else "",
    }
    shorter = {
        "speed": whole,
        "norm": f"norm {entry['grad_norm']:.3f}",
        "data": "",
        "experts": "",
        "memory": "",
        "lr": "",
        "mfu": "",
        "eta": "",
    }
    for name, short in shorter.items():
        if len("  ".join(filter(None, parts.values()))) > columns:
            parts[name] = short
    return "  ".join(filter(None, parts.values()))


def spread(load: Mapping[str, Sequence[float]]) -> str:
    """'experts 0.31-2.20': the load of the least and of the most loaded expert, over an even share."""
    every = [share for layer in load.values() for share in layer]
    return f"experts {min(every):.2f}-{max(every):.2f}" if every else ""


@contextmanager
def closed_terminal() -> Iterator[None]:
    """Writing to a terminal that has been closed fails; the run that was shown there still has to be saved."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


@closed_terminal()
def plain(entry: dict[str, Any]) -> None:
    """Print an entry as a line of words."""
    print(sentence(entry, terminal.width(WIDE)), flush=True)


@closed_terminal()
def as_json(entry: dict[str, Any]) -> None:
    """Print an entry as a line of JSON."""
    print(json.dumps({k: _number(v) for k, v in entry.items()}), flush=True)


@closed_terminal()
def tell(text: str) -> None:
    """Say something beside the journal, for the person who waits."""
    print(text, file=sys.stderr, flush=True)


class Live:
    """A bar, a small curve and the last numbers, redrawn in place; on a terminal only."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as Display

        self._console = Console(file=sys.stdout)
        self._losses: list[float] = []
        self._display = Display(console=self._console, refresh_per_second=4, transient=False)
        self._display.start()

    @closed_terminal()
    def __call__(self, entry: dict[str, Any]) -> None:
        if "event" in entry:
            self._console.print(sentence(entry), markup=False, highlight=False)
            return
        from rich.text import Text

        self._losses.append(entry["loss"])
        share = entry["step"] / entry["steps"]
        bar = "█" * int(40 * share) + "·" * (40 - int(40 * share))
        self._display.update(
            Text(
                f"{bar} {share:.0%}\n{sparkline(self._losses)}\n{sentence(entry, self._console.width)}", overflow="fold"
            )
        )

    @closed_terminal()
    def close(self) -> None:
        """Leave the last picture on the screen and stop redrawing."""
        self._display.stop()


def sparkline(values: list[float], width: int = 60) -> str:
    """A line of blocks: high where the value is."""
    shown = [v for v in values if math.isfinite(v)]
    if not shown:
        return ""
    step = max(1, -(-len(shown) // width))
    points = [sum(part) / len(part) for part in (shown[i : i + step] for i in range(0, len(shown), step))]
    low, high = min(points), max(points)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (p - low) / (high - low)) if high > low else 0] for p in points)
