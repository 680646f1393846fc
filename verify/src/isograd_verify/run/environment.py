"""ISOGRAD_VERIFY=report.json in the environment of anything that starts Python: each rank finds out by itself.

Ranks of one run write into one folder, `report.json.RUN`. The last of them to end, or else the process that started
them, judges what is there, writes the report, prints it to the standard error, and removes the folder.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from isograd_verify.watch.after_torch import AfterTorch

# What a launcher calls its run, where ranks have no Python process in common that started them.
LAUNCHERS = (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",))
FAILED = "failed"


def begin() -> None:
    """At the start of a Python process: watch it from the import of torch on, if it turns out to be a rank."""
    report = Path(os.environ["ISOGRAD_VERIFY"]).absolute()
    started_others = "ISOGRAD_VERIFY_RUN" not in os.environ
    called = ("-".join(os.environ[name] for name in names) for names in LAUNCHERS if set(names) <= os.environ.keys())
    parent, since = os.getppid(), ""
    with suppress(OSError):  # when the parent was started: its number may be another one's later
        since = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    run = os.environ.setdefault("ISOGRAD_VERIFY_RUN", next(called, f"{parent}-{since}"))
    os.environ["ISOGRAD_VERIFY"] = str(report)  # also of processes that start in another folder
    own = _Process(report, report.with_name(f"{report.name}.{run}"), started_others)
    AfterTorch(own.watch)
    atexit.register(own.end)  # the first to be registered is the last to be called: behind the capture's end


class _Process:
    """One Python process of a run, which may be a rank of it, or start the ranks."""

    def __init__(self, report: Path, home: Path, started_others: bool) -> None:
        self.report, self.home, self.started_others = report, home, started_others
        self.pid = os.getpid()

    def watch(self) -> None:
        """Once torch is there."""
        from isograd_verify.watch.watched import prepare

        os.register_at_fork(after_in_child=self._forked)
        prepare(str(self.home), self.end)

    def _forked(self) -> None:
        self.pid, self.started_others = os.getpid(), False

    def end(self) -> None:
        """Judge the run, when this is its last process."""
        if not self.home.is_dir():
            return
        ranks = [_about(path) for path in self.home.glob("rank-*")]
        me = any(one.get("pid") == self.pid for one in ranks)
        if me and getattr(sys, "last_type", None) is not None:
            (self.home / FAILED).touch()
        whole = bool(ranks) and all(one.get("finished") for one in ranks) and len(ranks) >= int(str(ranks[0]["world"]))
        if not whole and (me or not self.started_others):
            return
        try:
            os.close(os.open(self.home / "judged", os.O_CREAT | os.O_EXCL))
        except OSError:  # another process does it
            return
        try:
            self._judge()
        except Exception as error:
            print(f"isograd-verify: no report: {type(error).__name__}: {error}", file=sys.stderr)

    def _judge(self) -> None:
        import shutil

        from isograd_verify.record.recording import describe
        from isograd_verify.run.attach import inspect, masked
        from isograd_verify.tell.report import Report

        layout, steps = os.environ.get("ISOGRAD_VERIFY_LAYOUT", ""), os.environ.get("ISOGRAD_VERIFY_STEPS", "3")
        command, failed = masked(sys.orig_argv[1:]), int((self.home / FAILED).exists())
        describe(self.home, layout=layout, command=command, steps=steps, exit_code=failed, stalled=False)
        report = Report(" ".join(command), [inspect(self.home, None, command, failed)])
        self.report.write_text(json.dumps(report.data(), indent=1))
        print(f"{report}\nisograd-verify: {self.report}", file=sys.stderr, flush=True)
        shutil.rmtree(self.home, ignore_errors=True)


def _about(rank: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        found = json.loads((rank / "rank.json").read_text())
        if isinstance(found, dict) and "world" in found:
            return found
    return {"world": 1 << 30}
