"""Starts the ranks of a run on this machine, or joins those that torchrun or Slurm started.

The process that starts ranks takes the signals of its group for all of them: they may come while ranks are being made.
stop.py says how the ranks hear of them.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from isograd import scratch, screen
from isograd.checkpoint.folder import Growing
from isograd.comm.launch import World
from isograd.errors import IsogradError, LaunchError
from isograd.resilience import Crew
from isograd.train import journal
from isograd.train.config import Config
from isograd.train.devices import this_machine
from isograd.train.early import refuse_early
from isograd.train.job import prepare
from isograd.train.loop import Orders, Outcome, run
from isograd.train.opening import Opening, opening, refuse_data
from isograd.train.orphan import how_to_resume
from isograd.train.stall import STALLED, happened, patience, silent
from isograd.train.stop import STOPPED, Asked
from isograd.train.survive import survive


def start(config: Config, asked: Asked, *, resume: str, show: str, until: int | None, force: bool) -> int:
    """Show what will be done, and do it; the exit code."""
    out = sys.stderr if show == "json" else sys.stdout
    first = os.environ.get("RANK", "0") == "0"
    if _joins():
        _refuse_elsewhere(config)
        if first:
            with suppress(IsogradError):  # every rank finds the same mistake itself; none may leave before the others
                opened(config, resume, out)
        outcome = run(config, Orders(resume, show, until), asked)
        return _said(outcome) if first else outcome.code
    asked.listen([signal.SIGINT])
    found = opened(config, resume, out)
    refuse(found, force)
    refuse_data(config)
    refuse_early(config, resume)
    if config.task != "language":  # a conversation that cannot be learned from is refused before any rank starts
        prepare(config)
        refuse_data(config)
    if asked.why:
        journal.leave_code(config.folder, STOPPED)
        return _said(Outcome(STOPPED, 0, asked.why))
    with tempfile.TemporaryDirectory(prefix="stop-", dir=scratch.home()) as folder:
        file = Path(folder) / "stop"
        asked.pass_on(file)
        orders = Orders(resume, show, until, signals=(), passed_on=file)
        try:
            outcome = _done_here(config, found.layout.world_size, orders)
        except LaunchError:
            if happened(config.folder):
                return STALLED
            raise  # printed by the command line once every rank has ended: an error is the last thing on the screen
    return _said(outcome)


def _refuse_elsewhere(config: Config) -> None:
    """torchrun and Slurm end all ranks of a run when one of them dies."""
    if config.resilience.after_death != "end":
        raise LaunchError(
            "IG257", f"resilience.after_death {config.resilience.after_death} is for ranks that isograd starts itself",
            seen="ranks that torchrun or Slurm has started, which end together", expected="resilience.after_death end",
            fix="--resilience.after_death end --resilience.copies none: a new start by torchrun, or Slurm's requeue, "
            "resumes from the last checkpoint",
        )  # fmt: skip


@contextmanager
def says_how_to_resume(config: Config) -> Iterator[None]:
    """An error of the ranks that is none of isograd's own ends with what to do next."""
    try:
        yield
    except LaunchError as error:
        if error.cause is None and "resumes" not in (error.fix or ""):
            error.fix = "; ".join(filter(None, (error.fix, how_to_resume(config.folder))))
        raise


def _done_here(config: Config, ranks: int, orders: Orders) -> Outcome:
    """Start the ranks on this machine, and wait for them."""
    limit, deaf = patience(config.safety.stall_s), (signal.SIGTERM, signal.SIGHUP)
    busy = Growing(config.folder / "checkpoints")
    after = config.resilience
    with says_how_to_resume(config):
        if after.after_death != "end":
            with Crew(
                threads=config.threads, patience=limit, deaf=deaf, wait_s=after.wait_s, busy=busy,
                silent=partial(silent, config.folder, config.safety.stall_s),
                preload=("isograd.train.loop", "torch._dynamo"),
            ) as crew:  # fmt: skip
                return survive(config, orders, crew)
        with World(ranks, threads=config.threads, patience=limit, deaf=deaf, busy=busy) as world:
            outcome: Outcome = world.run(run, config, orders)[0]
            return outcome


def opened(config: Config, resume: str, out: TextIO) -> Opening:
    """The run and this machine, as they are shown before anything starts."""
    found = opening(config, this_machine())
    print(found.text(screen.width(100), resume), file=out, flush=True)
    return found


def refuse(found: Opening, force: bool) -> None:
    """What this machine cannot hold is refused, or said when the user insists."""
    problem = found.problem()
    if problem is not None and not force:
        raise problem
    if problem is not None:
        print(f"--force: started although {problem.what}", file=sys.stderr, flush=True)


@journal.closed_terminal()
def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _said(outcome: Outcome) -> int:
    if outcome.code == STOPPED and not outcome.losses:
        _tell("stopped before the first step; nothing to save")
    elif outcome.code:
        _tell(f"ended after step {outcome.step}: {outcome.why}")
    if outcome.code and "TORCHELASTIC_RUN_ID" in os.environ:
        _tell(f"this run's exit code is {outcome.code}; torchrun's own is 1, whatever its ranks end with "
              f"(a file 'exit-code' in the run's folder holds this run's)")  # fmt: skip
    return outcome.code


def _joins() -> bool:
    """Whether torchrun or Slurm started this process as a rank. Slurm's variables are copied to torch's names."""
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID",
             "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE"}  # fmt: skip
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "MASTER_ADDR" in os.environ:
        os.environ.update({ours: os.environ[theirs] for ours, theirs in slurm.items() if theirs in os.environ})
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
