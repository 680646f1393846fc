"""A rank that falls silent, or a connection that is lost, is named within the limit; the run ends with exit code 7.

Every rank's watchdog sees its own loop stand still, because the others wait for the silent one in a collective. Each
then writes into the run's folder where it is and which ranks it waits for. A rank that is *not* inside a collective, or
gives no sign at all, is the one that the others wait for. Two ranks that both wait for each other's message have lost
their connection. No collective is used to find out: collectives are what hangs.

Only seconds count in which a watchdog itself was running: a job that was suspended as one, or whose clock was set, goes
on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from isograd.comm.world import process
from isograd.elastic.progress import StallTimer
from isograd.errors import TrainError, listed
from isograd.io import atomic
from isograd.io.untrusted import FileError, read_typed
from isograd.train.run.heartbeat import Heartbeat

STALLED = 7
_WAITS = (
    "isograd/comm/raw.py",
    "isograd/comm/world.py",
    "isograd/comm/handle.py",
)  # the only files in which ranks wait for each other
FIRST = 10.0  # times the limit, until the first step is done
LONGEST = 1 << 20  # bytes of a report
SUSPENDED = 14 * 86400.0  # seconds; torch counts timeouts in milliseconds of 32 bits
LOOK_S = 1.0  # between two looks, or less


def patience(limit: float) -> float:
    """Seconds that collectives must wait at least, so that the watchdog is the first to speak; and longer than a job is
    ever suspended, as their clock goes on meanwhile."""
    return max(2 * FIRST * limit + 60, SUSPENDED)


def ended_in_stall(folder: Path) -> bool:
    """Whether the run's last end was a stall; every run sweeps its ranks' reports at its start."""
    return any((folder / "stalled").glob("rank-*.json"))


def _for_reports(limit: float) -> float:
    """Seconds that a watchdog waits for those of the other ranks, once it has spoken."""
    return min(10.0, max(1.0, limit / 4))


def silent_ranks(folder: Path, limit: float, size: int) -> Callable[[], dict[int, str]]:
    """For the launcher, when a world of this size begins: all reports that lie there from now on are that world's. The
    result says which ranks the others wait for in vain, and what is known of each: none until watchdogs have spoken,
    and where no rank is silent."""
    _sweep(folder / "stalled")
    files, spoke = [_file(folder / "stalled", rank) for rank in range(size)], StallTimer(2 * LOOK_S)

    def say() -> dict[int, str]:
        said = {rank: found for rank in range(size) if (found := _read(files[rank])) is not None}
        since = spoke.look(bool(said))
        if not said or (len(said) < size and since < _for_reports(limit)):
            return {}
        quiet = {
            rank: said[rank].phase if rank in said else ""
            for rank in range(size)
            if rank not in said or not said[rank].waits
        }
        return quiet if len(quiet) < size else {}

    return say


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _sweep(folder: Path) -> None:
    """Remove the reports of an earlier run, or of an earlier world."""
    for report in folder.glob("rank-*"):
        report.unlink(missing_ok=True)


@dataclass(frozen=True)
class RankReport:
    """What a rank's watchdog writes for those of the other ranks."""

    where: str  # the rank and its place in the layout
    host: str
    phase: str  # what the rank was doing
    waits: bool  # inside a collective
    awaits: list[int]  # the ranks whose messages it waits for, as far as known
    stack: list[str]  # its lines


class Watchdog:
    """`beat(phase)` says that this rank makes progress; without a beat for `limit` seconds the process ends.

    Between `joined` and `stepped` it has ten times as long: first steps import, compile and load.
    """

    def __init__(self, folder: Path, rank: int, size: int, limit: float, rescue_s: float = 0.0) -> None:
        """Started before the ranks have joined each other: a rank that never comes is named, too.

        rescue_s: how long the launcher may take to end a silent rank and to start the next world, which closes this.
        """
        self._rescue_s = rescue_s
        self.folder, self.rank, self.size, self.limit = folder / "stalled", rank, size, limit
        self.where, self.hosts = f"rank {rank}", list[str]()
        self.main = threading.main_thread().ident
        self.phase, self._sign = "joining the other ranks", object()  # what this rank is doing
        self._heartbeat: Heartbeat | None = None
        self.patience = 1.0
        self.before_end: Callable[[], None] = lambda: None  # what the process may still finish
        self.on_phase: Callable[[str], None] = lambda phase: None  # who else is told what this rank does
        self._over = threading.Event()
        _sweep(self.folder)
        self._every = min(LOOK_S, limit / 10)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="isograd stall watchdog")
        self._thread.start()

    def beat(self, phase: str) -> None:
        """This rank makes progress, and enters `phase`."""
        self.phase, self._sign = phase, object()
        self.on_phase(phase)

    def joined(self, where: str, hosts: Sequence[str], heartbeat: Heartbeat | None = None) -> None:
        """All ranks are there; `where` says which one this is, `hosts` on which machine each of them runs.

        heartbeat: what notices that machines no longer reach each other.
        """
        self.where, self.hosts, self.patience, self._heartbeat = where, list(hosts), FIRST, heartbeat
        if heartbeat is not None:
            heartbeat.patience = FIRST
            self._every = min(self._every, heartbeat.often)
            heartbeat.start(hosts)
        self.beat("starting")

    def stepped(self) -> None:
        """The first step is done: from now on the limit itself counts."""
        self.patience = 1.0
        if self._heartbeat is not None:
            self._heartbeat.patience = 1.0

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._thread.join()

    def _watch(self) -> None:
        quiet = StallTimer(2 * self._every)
        while not self._over.wait(self._every):
            lost = self._heartbeat.lost() if self._heartbeat is not None else None
            if lost is not None:
                self._end_cut_off(*lost)
            if quiet.look(self._sign) > self.limit * self.patience:
                self._end()

    def _end(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [_file(self.folder, rank) for rank in range(self.size)]
        atomic.replace_text(_file(self.folder, self.rank), json.dumps(asdict(self._own_report()), indent=1))
        others = StallTimer(1.0)
        while others.look(False) < _for_reports(self.limit) and not all(file.exists() for file in files):
            time.sleep(0.05)
        rescued = StallTimer(1.0)
        while self._rescue_s and rescued.look(False) < self._rescue_s:
            if self._over.wait(0.1):
                return
        if not any(file.exists() for file in files[: self.rank]):  # the first that gave a sign speaks for all
            print(self.diagnosis(), file=sys.stderr, flush=True)
        self.before_end()
        time.sleep(0.5)  # the first to leave would look like the culprit
        os._exit(STALLED)

    def _end_cut_off(self, silent: Sequence[int], cut_off: bool) -> None:
        """Other machines are out of reach, and perhaps the run's folder: nothing is read from it first."""
        assert self._heartbeat is not None
        here = socket.gethostname()
        meet = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ)
        seconds = self._heartbeat.limit * self._heartbeat.patience / 2
        seen = f"no answer from {meet or 'the store'}" if cut_off else f"no sign of life from {self._ranks(silent)}"
        others = sorted(set(self.hosts) - {here}) if cut_off else sorted({self.hosts[rank] for rank in silent} - {here})
        between = f"the network between {here} and {listed(others, 8)}" if others else f"rank {silent[0]} on {here}"
        error = TrainError(
            "IG979", f"other machines are out of reach, for {seconds:g} s, while {self.phase}",
            seen=f"{seen}; this rank {self._collective() or 'was not in a collective'}",
            expected="a sign of life from every rank within resilience.network_s",
            fix=f"check {between} (isograd check network); the same command then resumes from the last checkpoint",
            where=f"{self.where} on {here}",
        )  # fmt: skip
        print(error, file=sys.stderr, flush=True)
        last = threading.Thread(target=self.before_end, daemon=True)  # its folder may be out of reach, too
        last.start()
        last.join(self._heartbeat.limit / 3)
        os._exit(STALLED)

    def _collective(self) -> str | None:
        """Which function of comm this rank waits in, and who called it."""
        frames = sys._current_frames()
        for thread in sorted(frames, key=lambda thread: thread != self.main):
            stack = traceback.extract_stack(frames[thread])
            for caller, frame in pairwise(stack):
                if frame.filename.endswith(_WAITS):
                    to = f", for rank {other}" if (other := process.awaited()) is not None else ""
                    file = "/".join(Path(caller.filename).parts[-2:])
                    return f"waits in {frame.name}{to}, called in {file}:{caller.lineno} {caller.name}"
        return None

    def _own_report(self) -> RankReport:
        frames = sys._current_frames()
        # On a GPU backward runs in threads of its own, and may wait there.
        lines = [line for frame in frames.values() for line in traceback.format_stack(frame)]
        awaits = [] if (other := process.awaited()) is None else [other]
        return RankReport(
            self.where, socket.gethostname(), self.phase, any(file in line for line in lines for file in _WAITS),
            awaits, "".join(traceback.format_stack(frames[self.main or 0])).splitlines(),
        )  # fmt: skip

    def diagnosis(self) -> str:
        """The silent ranks and where they were, or the connections that were lost, from the reports of all ranks."""
        reports = {rank: found for rank in range(self.size) if (found := _read(_file(self.folder, rank))) is not None}
        silent = [rank for rank in range(self.size) if rank not in reports or not reports[rank].waits]
        seen, fix = self._findings(reports, silent)
        error = TrainError(
            "IG980", f"no progress for {self.limit * self.patience:g} s while {self.phase}", seen=seen,
            expected="a step within safety.stall_s on every rank" if self.hosts else f"{self.size} ranks",
            fix=f"{fix}; all stacks are in {self.folder}",
        )  # fmt: skip
        lines = [str(error)]
        for rank in (silent or list(reports))[:4]:
            found = reports.get(rank)
            if found is not None:
                lines += [f"\nrank {rank}:", f"{found.where} on {found.host}: {found.phase}", *found.stack]
            elif self.hosts:
                lines.append(f"\nrank {rank}{self._on(rank)} gave no sign: stopped, dead, or cut off with its machine")
            else:
                lines.append(f"\nrank {rank} was never seen")
        return "\n".join(lines)

    def _findings(self, reports: Mapping[int, RankReport], silent: Sequence[int]) -> tuple[str, str]:
        """(what is wrong, what to do)."""
        if not self.hosts:
            return self._not_joined(silent)
        if silent:
            gone = sorted({self.hosts[rank] for rank in silent if rank not in reports} - {socket.gethostname()})
            reach = f"see whether {listed(gone, 8)} can be reached from {socket.gethostname()}; " if gone else ""
            return f"the others wait for {self._ranks(silent)}", f"{reach}read the stacks below"
        lost = [
            (rank, other)
            for rank, report in reports.items()
            for other in report.awaits
            if rank < other and rank in reports[other].awaits
        ]
        same = len({tuple(report.stack) for report in reports.values()}) == 1
        if not lost and not same:
            return (
                "every rank waits in a collective, at different places: they wait for different ones",
                "read the stacks below: a rank has called a collective that another has not",
            )
        pairs = [f"rank {a}{self._on(a)} and rank {b}{self._on(b)}" for a, b in lost]
        between = f" between {listed(pairs, 8)}" if pairs else ""
        places = (
            "the same place in the program" if same else "different places: or they have called different collectives"
        )
        hosts = sorted(set(self.hosts))
        network = f"the network between {listed(hosts, 8)}" if len(hosts) > 1 else f"the network of {hosts[0]}"
        return (
            f"connection lost{between}: each waits for the other's message, at {places}",
            f"check {network}{'' if same else ', then the stacks below'}; "
            "the same command then resumes from the last checkpoint",
        )

    def _not_joined(self, missing: Sequence[int]) -> tuple[str, str]:
        meet = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ)
        at = f" at {meet}" if meet else ""
        if not missing:
            return (
                f"all {self.size} ranks have started, and do not reach each other{at}",
                f"check the network of their machines, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME on {self.where}",
            )
        return (
            f"{self._ranks(missing)} of {self.size} did not join {self.where} on {socket.gethostname()}{at}",
            f"start the missing ranks; if they run, their machines do not reach {meet or 'this one'} "
            "or have another run folder",
        )

    def _ranks(self, ranks: Sequence[int]) -> str:
        """The ranks by number and machine."""
        machines = list(dict.fromkeys(self.hosts[rank] for rank in ranks)) if self.hosts else []
        on = f" on {listed(machines, 8)}" if machines else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {listed(list(map(str, ranks)), 8)}{on}"

    def _on(self, rank: int) -> str:
        return f" on {self.hosts[rank]}" if self.hosts else ""


def _read(file: Path) -> RankReport | None:
    """None when the rank wrote nothing."""
    try:
        return read_typed(RankReport, file, LONGEST)
    except FileError:
        return None
