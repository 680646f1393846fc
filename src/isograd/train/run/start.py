"""Starts the ranks of a run on this machine, or joins those that torchrun or Slurm started.

The process that starts ranks takes the signals of its group for all of them: they may come while ranks are being made.
signals.py says how the ranks learn of them.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from isograd.checkpoint.folder import Growing
from isograd.elastic import WorkerPool, offers
from isograd.errors import CommError, IsogradError, LaunchError
from isograd.io import tempdir, terminal
from isograd.launcher.launch import World
from isograd.train import journal, resources, run_folder, texts
from isograd.train.config import Config
from isograd.train.loop import RunOptions, RunOutcome, run
from isograd.train.run.signals import STOPPED, SignalListener
from isograd.train.run.survive import ENDS_SURVIVAL, state_of, survive
from isograd.train.run.watchdog import STALLED, ended_in_stall, patience, silent_ranks
from isograd.train.startup import StartupSummary, refuse_data, refuse_early, summarize


def start(config: Config, listener: SignalListener, given: RunOptions, *, force: bool) -> int:
    """Show what will be done, and do it; the exit code. `given`: what the command line says."""
    resume, show = given.resume, given.show
    out = sys.stderr if show == "json" else sys.stdout
    first = os.environ.get("RANK", "0") == "0"
    if _joins():
        _refuse_elsewhere(config)
        # torchrun starts its ranks again whatever they ended with, also when they were asked to stop.
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (code := run_folder.exit_code(config.folder)):
            return code
        if first:
            with suppress(IsogradError):  # every rank finds the same mistake itself; none may leave before the others
                print_summary(config, resume, out)
        try:
            outcome = run(config, given, listener)
        except CommError as error:
            if error.code == "IG213" and config.resilience.after_death != "end":  # another rank has died
                held = {0: offers(config.run)}
                said = state_of(config, lambda jobs: ({n: do(*args) for n, (do, args) in jobs.items()}, {}), held)
                print(f"isograd: {said}", file=sys.stderr, flush=True)
            raise
        return _said(outcome) if first else outcome.code
    listener.listen([signal.SIGINT])
    found = print_summary(config, resume, out)
    refuse(found, force)
    refuse_data(config)
    refuse_early(config, resume)
    if config.task != "language":  # a conversation that cannot be learned from is refused before any rank starts
        texts.prepare(config)
        refuse_data(config)
    if listener.why:
        run_folder.write_exit_code(config.folder, STOPPED)
        return _said(RunOutcome(STOPPED, 0, listener.why))
    with tempfile.TemporaryDirectory(prefix="stop-", dir=tempdir.home()) as folder:
        file = Path(folder) / "stop"
        listener.forward_to(file)
        options = replace(given, signals=(), stop_file=file)
        try:
            outcome = _done_here(config, found.layout.world_size, options)
        except LaunchError as error:
            if error.code not in ENDS_SURVIVAL and ended_in_stall(config.folder):
                return STALLED
            raise  # printed by the command line once every rank has ended: an error is the last thing on the screen
    return _said(outcome)


def _refuse_elsewhere(config: Config) -> None:
    """torchrun and Slurm end all ranks of a run when one of them dies, with the memory that holds copies."""
    after = config.resilience
    if after.after_death == "shrink" or after.copies != "none":
        raise LaunchError(
            "IG257", "resilience.copies, and after_death shrink, are for ranks that isograd starts itself",
            seen="ranks that torchrun or Slurm has started, which end together",
            expected="after_death replace: all ranks are started again, and resume (--emit writes how often)",
            fix="--resilience.after_death replace --resilience.copies none",
        )  # fmt: skip


@contextmanager
def says_how_to_resume(config: Config) -> Iterator[None]:
    """An error of the ranks that is none of isograd's own ends with what to do next."""
    try:
        yield
    except LaunchError as error:
        if error.cause is None and "resumes" not in (error.fix or ""):
            error.fix = "; ".join(filter(None, (error.fix, run_folder.how_to_resume(config.checkpoints))))
        raise


def _done_here(config: Config, ranks: int, options: RunOptions) -> RunOutcome:
    """Start the ranks on this machine, and wait for them."""
    limit, deaf = patience(config.safety.stall_s), (signal.SIGTERM, signal.SIGHUP)
    busy = Growing(config.checkpoints)
    after = config.resilience
    with says_how_to_resume(config):
        if after.after_death != "end":
            with WorkerPool(
                threads=config.threads, patience=limit, deaf=deaf, wait_s=after.wait_s, still_s=config.safety.stall_s,
                busy=busy, silent=partial(silent_ranks, config.folder, config.safety.stall_s),
                preload=("isograd.train.loop", "torch._dynamo"), device=config.device,
            ) as pool:  # fmt: skip
                return survive(config, options, pool)
        threads, device = config.threads, config.device
        with World(ranks, threads=threads, patience=limit, deaf=deaf, busy=busy, device=device) as world:
            outcome: RunOutcome = world.run(run, config, options)[0]
            return outcome


def print_summary(config: Config, resume: str, out: TextIO) -> StartupSummary:
    """The run and this machine, as they are shown before anything starts."""
    found = summarize(config, resources.this_machine(config.device))
    print(found.text(terminal.width(100), resume), file=out, flush=True)
    return found


def refuse(found: StartupSummary, force: bool) -> None:
    """What this machine cannot hold is refused, or said when the user insists."""
    problem = found.problem()
    if problem is not None and not force:
        raise problem
    if problem is not None:
        print(f"--force: started although {problem.what}", file=sys.stderr, flush=True)


def _said(outcome: RunOutcome) -> int:
    if outcome.code == STOPPED and not outcome.losses:
        journal.tell("stopped before the first step; nothing to save")
    elif outcome.code:
        journal.tell(f"ended after step {outcome.step}: {outcome.why}")
    if outcome.code and "TORCHELASTIC_RUN_ID" in os.environ:
        journal.tell(f"this run's exit code is {outcome.code}; torchrun's own is 1, whatever its ranks end with "
              f"(a file 'exit-code' in the run's folder holds this run's)")  # fmt: skip
    return outcome.code


def _joins() -> bool:
    """Whether torchrun or Slurm started this process as a rank. Slurm's variables are copied to torch's names."""
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID",
             "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE"}  # fmt: skip
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "MASTER_ADDR" in os.environ:
        os.environ.update({ours: os.environ[theirs] for ours, theirs in slurm.items() if theirs in os.environ})
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
