"""Requests to stop are seen; silent ranks are named. Small processes, no training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from isograd.train.run.signals import SignalListener, StopRequest
from isograd.train.run.watchdog import patience

WORKER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from isograd.comm.handle import Handle
from isograd.comm.world import process
from isograd.train.run import watchdog
rank, size = int(sys.argv[2]), int(sys.argv[3])
kind, _, other = sys.argv[4].partition(" for ")
(Path(sys.argv[1]) / f"imported-{rank}").touch()  # which takes seconds where much else runs
while len(list(Path(sys.argv[1]).glob("imported-*"))) < int(sys.argv[5]):
    time.sleep(0.01)
watchdog.socket.gethostname = lambda: f"host{rank}"
dog = watchdog.Watchdog(Path(sys.argv[1]), rank, size, 0.5)
dog.joined(f"rank {rank} (dp{rank})", [f"host{n}" for n in range(size)])
dog.stepped()
dog.beat("in step 3, optimizer")
message = SimpleNamespace(wait=lambda: time.sleep(60))
group = SimpleNamespace(ranks=range(size), refuse_closed=lambda: None, context=process)
handle = Handle(group if other else None)
handle.add(message, int(other or 0))
if kind == "waits elsewhere":
    handle.wait()
handle.wait() if kind == "waits" else time.sleep(60)
"""


def stalled(folder: Path, kinds: list[str]) -> list[subprocess.CompletedProcess[str]]:
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, str(folder / "worker.py"), str(folder)]
    alive = str(len(kinds) - kinds.count("dead"))
    running = [
        subprocess.Popen([*command, str(rank), str(len(kinds)), kind, alive], stderr=subprocess.PIPE, text=True)
        for rank, kind in enumerate(kinds)
        if kind != "dead"
    ]
    return [
        subprocess.CompletedProcess(p.args, p.wait(60), stderr=p.stderr.read() if p.stderr else "") for p in running
    ]


SUSPENDED = """
import os, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from isograd.train.run import heartbeat, watchdog

class Store:
    def __init__(self): self.signs = {}
    def set(self, name, value): self.signs[name] = value.encode() if isinstance(value, str) else value
    def get(self, name): return self.signs[name]
    def multi_get(self, names): return [self.signs[name] for name in names]
    def check(self, names): return names[0] in self.signs

store = Store()
heartbeat.clone_store = lambda: store
dog = watchdog.Watchdog(Path(sys.argv[1]), 0, 2, 2.0)
other, mine = heartbeat.Heartbeat(1, 2, 3.0), heartbeat.Heartbeat(0, 2, 3.0)
other.start(["a", "b"])
dog.joined("rank 0 (dp0)", ["a", "b"], mine)
other.patience = 1.0
dog.stepped()
dog.beat("in step 3")
Path(sys.argv[1], "ready").touch()
time.sleep(float(sys.argv[2]))
dog.beat("in step 4")
print("went on", flush=True)
time.sleep(float(sys.argv[3]))
dog.close()
other.close()
print("ended", flush=True)
"""


@pytest.mark.parametrize("stands", [False, True])
def test_a_process_that_was_suspended_blames_nobody_and_still_finds_who_stands_still(
    tmp_path: Path, stands: bool
) -> None:
    """FAILURES E10: a false diagnosis, and exit code 7."""
    (tmp_path / "suspended.py").write_text(SUSPENDED)
    command = [sys.executable, str(tmp_path / "suspended.py"), str(tmp_path), "1.5", "60" if stands else "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        said, wrong = process.communicate(timeout=60)
    assert said.split("\n")[0] == "went on", wrong
    assert (process.returncode, "ended" in said) == ((7, False) if stands else (0, True)), wrong
    assert ("IG980: no progress for 2 s while in step 4" in wrong) == stands


def test_collectives_wait_longer_than_a_job_is_suspended() -> None:
    assert patience(1.0) > 7 * 86400
    assert patience(600.0) * 1000 < 2**31  # as torch has it


def test_a_signal_and_files_are_heard_and_handlers_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    asked = SignalListener([signal.SIGUSR1])
    stop_request = StopRequest(tmp_path, asked, looks=True)
    assert not stop_request.is_set()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop_request.is_set()
    assert stop_request.why == "SIGUSR1"
    asked.forward_to(tmp_path / "asked")
    asked.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    rank = StopRequest(tmp_path, SignalListener([]), looks=True, stop_file=tmp_path / "asked")
    assert rank.is_set()
    assert rank.why == "asked to stop"
    (tmp_path / "STOP").touch()
    blind, sees = (
        StopRequest(tmp_path, SignalListener([]), looks=False),
        StopRequest(tmp_path, SignalListener([]), looks=True),
    )
    assert not blind.is_set()
    assert sees.is_set()
    assert sees.why == "a STOP file"
    sees.done()
    assert not (tmp_path / "STOP").exists()


def test_a_closed_terminal_is_a_request_unless_the_process_was_started_to_ignore_it(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, why in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "")):
            signal.signal(signal.SIGHUP, handler)
            with closing(SignalListener()) as asked:
                os.kill(os.getpid(), signal.SIGHUP)
                assert asked.why == why
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_ctrl_c_asks_and_the_second_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(SignalListener([signal.SIGINT])) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.why == "Ctrl-C"
        assert "Ctrl-C again ends at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_silent_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = stalled(tmp_path, ["waits", "sleeps", "waits"])
    assert [p.returncode for p in ended] == [7, 7, 7]
    assert time.monotonic() - began < 60
    said = ended[0].stderr
    assert "IG980: no progress for 0.5 s while in step 3, optimizer\n" in said
    assert "the others wait for rank 1 on host1\n" in said
    assert "rank 1 (dp1) on host1: in step 3, optimizer" in said
    assert "time.sleep(60)" in said
    assert not ended[1].stderr
    assert not ended[2].stderr


def test_a_rank_that_gives_no_sign_is_the_silent_one(tmp_path: Path) -> None:
    ended = stalled(tmp_path, ["waits", "dead"])
    assert "the others wait for rank 1 on host1\n" in ended[0].stderr
    assert "rank 1 on host1 gave no sign" in ended[0].stderr
    assert "see whether host1 can be reached from host0" in ended[0].stderr


def test_ranks_that_wait_at_different_places_wait_for_different_things(tmp_path: Path) -> None:
    ended = stalled(tmp_path, ["waits", "waits elsewhere"])
    assert "every rank waits in a collective, at different places" in ended[0].stderr


@pytest.mark.parametrize("place", ["waits", "waits elsewhere"])
def test_two_ranks_that_wait_for_each_other_have_lost_their_connection_which_is_named(
    tmp_path: Path, place: str
) -> None:
    """FAILURES B9: of a cut network it was said that the ranks waited for different things."""
    ended = stalled(tmp_path, ["waits for 2", "waits for 0", f"{place} for 0"])
    assert "connection lost between rank 0 on host0 and rank 2 on host2: " in ended[0].stderr
    assert ("at the same place" if place == "waits" else "at different places") in ended[0].stderr
    assert "check the network between host0, host1, host2" in ended[0].stderr
    assert "resumes from the last checkpoint" in ended[0].stderr


def test_a_lost_connection_is_said_where_nobody_knows_which(tmp_path: Path) -> None:
    """NCCL does not say which rank it waits for."""
    ended = stalled(tmp_path, ["waits", "waits"])
    assert "connection lost: each waits for the other's message, at the same place" in ended[0].stderr
