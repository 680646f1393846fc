"""The loop of a run, on one rank: train, evaluate, save, show, and end cleanly.

One small exchange a step tells all ranks whether anyone was asked to stop, so that they end after the same step; and
how long each has waited for others, by which late ones are named (stragglers.py).
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isograd.checkpoint import CheckpointManager, NotFinite
from isograd.comm import raw
from isograd.comm.consensus import run_or_raise_on_all_ranks
from isograd.comm.world import rank_and_size, set_collective_timeout
from isograd.core.mesh import Mesh
from isograd.elastic import Copies, Recovery, process_progress
from isograd.engine import Stats
from isograd.engine.ema import averaged
from isograd.errors import DataError, TrainError, headline
from isograd.io import atomic, plots
from isograd.launcher import worker
from isograd.train import journal, run_folder, texts
from isograd.train.config import Config
from isograd.train.optimizers import PROGRESS, LearningRateSchedule
from isograd.train.reading import changed, differing, written
from isograd.train.resources import most_memory, peak_flops
from isograd.train.run import peers
from isograd.train.run.corruption import CorruptionChecks, is_due
from isograd.train.run.heartbeat import Heartbeat
from isograd.train.run.profiling import StepProfile
from isograd.train.run.signals import GROW_EVENT, NO_RANK_MISSING, SIGNALS, STOPPED, SignalListener, StopRequest
from isograd.train.run.stragglers import Stragglers, Waiting
from isograd.train.run.watchdog import Watchdog, patience
from isograd.train.task import TrainingTask, seed_generators
from isograd.train.tasks import make_task
from isograd.train.trackers import trackers

NOT_FINITE = 6
MAY_CHANGE = "steps", "model", "optimizer", "pairs", "preference", "grpo", "distil", "ema"  # told at a resume
MOST_SKIPPED = 20  # steps in a row


@dataclass
class RunOutcome:
    """How a run ended; equal on all ranks, apart from `why` of a request to stop."""

    code: int
    step: int  # how many were done in all
    why: str = ""
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    sent: int = 0  # bytes that left this rank in its steps, where `RunOptions.sent` counts them


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to a config."""

    resume: str = "auto"  # a path, "auto" or "never"
    show: str = "lines"  # "live", "json" or "none"
    profile: tuple[int, int] | None = None  # the first and the last step that torch's profiler looks at
    until: int | None = None  # end after this step, as if asked to stop; None: at the end
    signals: tuple[Any, ...] = SIGNALS  # which this rank takes as requests to stop
    stop_file: Path | None = None  # the launcher makes this file when it is asked to stop
    before_step: Callable[[int, TrainingTask], None] | None = None  # for tests that break things
    notes: tuple[tuple[str, str], ...] = ()  # what the launcher has to say: (event, text), each of a world before
    recovery: Recovery | None = None  # from the last of them; it ends with the first step
    grows: bool | None = None  # whether the run has fewer ranks than its layout, so that a file GROW ends this world
    sent: Callable[[], int] | None = None  # counts the bytes that have left this rank so far


def run(config: Config, options: RunOptions, listener: SignalListener | None = None) -> RunOutcome:
    """Train by a config on this rank, which joins the world of the others; all ranks of it call this.

    listener: what has noted signals since the process began; without it `options.signals` are noted from here on.
    """
    stall_s = config.safety.stall_s
    with ExitStack() as stack:
        set_collective_timeout(patience(stall_s))
        rescue_s = 0.0 if options.grows is None else config.resilience.wait_s
        watchdog = Watchdog(config.folder, *rank_and_size(), stall_s, rescue_s)
        stack.callback(watchdog.close)
        stack.callback(lambda: setattr(process_progress, "phase", watchdog.phase))
        first = rank_and_size()[0] == 0  # one speaks, also between this world and the next
        worker.when_orphaned(
            partial(run_folder.launcher_killed, config.checkpoints, lambda: watchdog.phase) if first else None
        )
        mesh = Mesh(config.layout, config.device)
        heartbeat = Heartbeat(mesh.rank, mesh.layout.world_size, config.resilience.network_s)
        watchdog.joined(mesh.describe_rank(), peers.hosts(mesh), heartbeat)
        peers.same_config(written(config), mesh)
        run_folder.make_folder(config.folder)
        if options.recovery is None and config.resilience.after_death != "end":
            since = run_folder.since_death(config.folder) if mesh.rank == 0 else None
            if _any_rank(mesh, since is not None):
                options = replace(options, recovery=Recovery(time.monotonic() - (since or 0.0)))
        if options.recovery is not None:
            options.recovery.done("ranks joined")
        if mesh.rank == 0:
            run_folder.write_exit_code(config.folder, None)
        if listener is None:
            listener = SignalListener(options.signals)
            stack.callback(listener.close)
        stop_request = StopRequest(
            config.folder, listener, looks=mesh.rank == 0, stop_file=options.stop_file, grows=options.grows
        )
        watchdog.beat("preparing data")
        run_or_raise_on_all_ranks(lambda: texts.prepare(config) if mesh.rank == 0 else None, mesh, DataError, _no_data)
        if _any_rank(mesh, stop_request.is_set()):
            outcome = RunOutcome(STOPPED, 0, stop_request.why or "asked to stop")
        else:
            watchdog.beat("building the model")
            outcome = _Run(config, mesh, options, watchdog, stop_request, stack).go()
        stop_request.done()
        if mesh.rank == 0:
            run_folder.write_exit_code(config.folder, outcome.code)
        return outcome


class _Run:
    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        options: RunOptions,
        watchdog: Watchdog,
        stop_request: StopRequest,
        stack: ExitStack,
    ) -> None:
        self.config, self.mesh, self.options = config, mesh, options
        self.watchdog, self.stop_request = watchdog, stop_request
        seed_generators(config, mesh)
        self.task = make_task(config, mesh, watchdog.beat)
        self._recovered("model built")
        keep = config.checkpoint
        self.keeper = CheckpointManager(
            config.checkpoints, self.task.engine, keep_last=keep.keep_last, keep_every=keep.keep_every,
            on_error=keep.on_error, beat=watchdog.beat,
            tell=lambda step, text: self._event("not saved", f"the checkpoint of step {step}: {text}", step),
        )  # fmt: skip
        stack.enter_context(self.keeper)
        watchdog.before_end = self.keeper.let_finish
        self.checks = CorruptionChecks(config, self.task.engine, partial(self._event, "corrupted"))
        self.skipped_damaged: tuple[str, ...] = ()
        self.best: float | None = None  # the lowest held-out loss
        self.not_better = 0  # evaluations since then
        self.differs: list[str] = []  # options that may change on resume, and have
        self.schedule = LearningRateSchedule(config.optimizer, self.task.engine.optimizer, config.steps)
        self.start = self._resume()
        process_progress.finished(self.start)
        self._recovered("state loaded")
        self.copies: Copies | None = None
        after = config.resilience
        if after.after_death != "end" and mesh.layout.world_size > 1:
            copies = self.copies = Copies(
                self.task.engine, config.run, self._extra(), partner=after.copies == "partner"
            )
            stack.push(lambda kind, *_: copies.close(failed=kind is not None))
            self.checks.from_copy = copies.restore
        self.waiting, self.stragglers, self.met = Waiting(), Stragglers(watchdog.hosts), time.perf_counter()
        stack.callback(self.waiting.close)
        self.log: journal.Journal | None = None
        if mesh.rank == 0:
            self._open_journal(stack)
        self.profile = StepProfile(options.profile, config.folder, mesh.rank, partial(self._event, "profile"))
        stack.callback(self.profile.close)
        watchdog.on_phase = self.profile.enter
        self.peak = peak_flops(mesh.device, config)
        self.skipped = self.skipped_in_a_row = 0
        self.losses: list[float] = []
        self.sent = 0  # bytes, in steps
        self.waited = 0.0
        self.paused = 0.0  # seconds of evaluation and saving since the last line

    def _resume(self) -> int:
        if self.options.resume == "never":
            run_folder.refuse_earlier_run(self.config.checkpoints)
            return 0
        groups = self.task.engine.optimizer.param_groups
        ours = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        with warnings.catch_warnings():  # of damage, which the log tells, too
            warnings.filterwarnings("ignore", message="loaded step-")
            found = self.keeper.load(self.options.resume)
        if found is None:
            return 0
        for group, values in zip(groups, ours, strict=True):  # decay rates and such are the config's
            group.update({name: value for name, value in values.items() if name not in PROGRESS})
        if found.extra.get("data") not in (None, self.task.fingerprint):
            raise TrainError(
                "IG986", "the checkpoint was trained on other data, or in another order",
                seen="; ".join([str(found.path), *changed(found.extra.get("config"), self.config)]),
                expected="the same sources, length, batch and seed, so that no sample is seen twice or never",
                fix="restore these values; or export the checkpoint (isograd ckpt convert) and start a new run "
                "from its weights (model.path)",
                where=self.mesh.describe_rank(),
            )  # fmt: skip
        before = found.extra.get("starts_from")  # None: an older isograd's; empty: of a loss without references
        if before and self.task.starts_from not in ("", before):
            raise TrainError(
                "IG986", "the checkpoint's run began from another model, with which its loss compares",
                seen=f"{found.path}; other weights in model.path or distil.teacher, or other values of `model`",
                expected="the model that the run began from, or its teacher, which the loss compares with",
                fix="restore these files and `model`; or start a new run from them (--run FOLDER)",
                where=self.mesh.describe_rank(),
            )  # fmt: skip
        self.skipped_damaged = found.skipped_damaged
        self.best, self.not_better = found.extra.get("early_stopping", (None, 0))
        self.keeper.best = found.extra.get("best_step")
        self.differs = differing(found.extra.get("config"), self.config, MAY_CHANGE)
        return found.step

    def _open_journal(self, stack: ExitStack) -> None:
        folder = self.config.folder
        atomic.replace_text(folder / "config.yaml", f"{run_folder.WRITTEN}\n{written(self.config)}")
        sinks: list[Callable[[dict[str, Any]], None]] = trackers(self.config, folder, stack)
        if self.options.show == "live":
            live = journal.Live()
            stack.callback(live.close)
            sinks.append(live)
        elif self.options.show != "none":
            sinks.append(journal.as_json if self.options.show == "json" else journal.plain)
        patient = self.config.checkpoint.on_error != "stop"
        self.log = journal.Journal(folder / "metrics.jsonl", self.start, sinks, patient)
        stack.callback(self.log.close)
        if self.task.notice:
            self._event("note", self.task.notice, self.start)
        if self.options.notes:
            known = Counter(line.get("text") for line in journal.read(folder / "metrics.jsonl"))
            for event, text in self.options.notes:
                known[text] -= 1  # a rank may die twice in the same way
                if known[text] < 0:
                    self._event(event, text, self.start)
        if self.options.recovery is not None:
            self.log.restarted(sum(self.options.recovery.seconds.values()))
        if self.start:
            text = f"resumed from the checkpoint of step {self.start}"
            text += f"; newer ones are damaged: {'; '.join(self.skipped_damaged)}" if self.skipped_damaged else ""
            text += f"; with other options: {'; '.join(self.differs)}" if self.differs else ""
            self._event("resumed", text, self.start)

    def _recovered(self, name: str) -> None:
        if self.options.recovery is not None:
            self.options.recovery.done(name)

    def _event(self, event: str, text: str, step: int, **more: Any) -> None:
        if self.log is not None:
            self.log.write(step=step, event=event, text=text, **more)

    def go(self) -> RunOutcome:
        step = self.start
        if early := self._stopping(step):
            return early
        missed = self._missed_evaluation(step)
        if missed or (self.config.evaluate.first and step == 0):
            self._evaluate(step)
        if missed and (self.config.evaluate.patience or self.config.checkpoint.keep_best):  # its checkpoint says more
            self.keeper.save(step, self._extra())
        if self._stops_early(step):
            return self._finish(step)
        began, at = time.perf_counter(), step
        for batch in self._batches(step):
            self.profile.before(step + 1)
            rate = self.schedule.set(step)
            before = self._sent()
            stats = self.checks.step(step + 1, batch, partial(self._gather, step, batch))
            self.sent += self._sent() - before
            self.watchdog.stepped()
            step += 1
            process_progress.finished(step)
            if step == self.start + 1 and (recovery := self.options.recovery) is not None:
                recovery.done("step")
                self._event("recovered", str(recovery), self.start, parts=recovery.seconds)
            self.losses.append(stats.loss)
            ending = self._not_finite(stats, step)
            if step % self.config.log.every == 0 or step in (self.start + 1, self.config.steps) or stats.skipped:
                now = time.perf_counter()
                self._show(step, step - at, now - began - self.paused, stats, rate)
                began, at, self.paused = now, step, 0.0
            if self.copies is not None:  # after the journal's line: a step that outlives a death has its line
                self.watchdog.beat(f"copying after step {step}")
                self.copies.start(step)
            pause = time.perf_counter()
            ending = ending or self._stopping(step)
            ending = self._after_step(step, ending) or ending
            self.profile.after(step)
            self.paused += time.perf_counter() - pause
            if ending:
                return ending if ending.code else self._finish(step)
        return self._finish(step)

    def _sent(self) -> int:
        return 0 if self.options.sent is None else self.options.sent()

    def _gather(self, step: int, batch: Any) -> None:
        self.watchdog.beat(f"in step {step + 1}, forward and backward")
        if self.options.before_step is not None:
            self.options.before_step(step, self.task)
        self.task.accumulate(batch)
        self.checks.check_seal()
        self._compare(step + 1)
        if self.copies is not None:
            self.watchdog.beat(f"in step {step + 1}, waiting for copies")
            self.copies.finish()
        self.watchdog.beat(f"in step {step + 1}, optimizer")

    def _batches(self, first: int) -> Iterator[dict[str, Any]]:
        """Read one step ahead, in a thread: reading is no part of a step."""
        with ThreadPoolExecutor(1, "isograd data") as reader:
            coming: Future[dict[str, Any]] | None = None
            for step in range(first, self.config.steps):
                batch = coming or reader.submit(self.task.batch, step)
                began = time.perf_counter()
                ready = batch.result()
                self.waited += time.perf_counter() - began
                coming = reader.submit(self.task.batch, step + 1) if step + 1 < self.config.steps else None
                yield ready

    def _not_finite(self, stats: Stats, step: int) -> RunOutcome | None:
        if not stats.skipped:
            self.skipped_in_a_row = 0
            return None
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        if self.task.engine.loss_scale is not None and self.skipped_in_a_row < MOST_SKIPPED:
            return None  # how a loss scale finds its place
        whose = f"not finite: {stats.nonfinite}"
        self._event("skipped", whose, step)
        if self.config.safety.not_finite == "skip" and self.skipped_in_a_row < MOST_SKIPPED:
            return None
        return self._outcome(NOT_FINITE, step - 1, f"step {step}: {whose}; no rank stepped")

    def _stopping(self, step: int) -> RunOutcome | None:
        if self.stop_request.drop_needless_grow():
            self._event(GROW_EVENT, NO_RANK_MISSING, step)
        until = self.options.until
        ends = self.stop_request.is_set() or (until is not None and step >= until)
        if step == self.config.steps:
            return None
        ended, failed = self._meet(ends, step)
        if failed:
            self.watchdog.beat(f"looking after the checkpoint that failed before step {step}")
            self.keeper.look()
        if not ended:
            return None
        return self._outcome(STOPPED, step, self.stop_request.why or "asked to stop")

    def _meet(self, ends: bool, step: int) -> tuple[bool, bool]:
        """The exchange of a step: whether any rank is to end, or has a save that failed. Late ranks are named."""
        own = [float(ends), float(self.keeper.failed), self.waiting.take()]
        mine = torch.tensor(own, dtype=torch.float64, device=self.mesh.device)
        rows = raw.gather(mine, self.mesh.group("world")).tolist()
        before, self.met = self.met, time.perf_counter()
        if len(rows) > 1 and step > self.start:
            for text in self.stragglers.after(self.met - before, [waited for _, _, waited in rows]):
                self._event("straggler", text, step)
        return any(row[0] for row in rows), any(row[1] for row in rows)

    def _outcome(self, code: int, step: int, why: str) -> RunOutcome:
        return RunOutcome(code, step, why, self.skipped, self.losses, self.sent)

    def _compare(self, step: int) -> None:
        """Before the optimizer writes: at ZeRO 1 and 2 its step overwrites every copy."""
        every = self.config.safety.replicas_every
        saves = step == self.config.steps or is_due(step, self.config.checkpoint.every)
        if every and (saves or step % every == 0):
            self.watchdog.beat(f"comparing copies in step {step}")
            peers.equal_copies(self.task.engine, step)

    def _after_step(self, step: int, ending: RunOutcome | None) -> RunOutcome | None:
        """Evaluate and save when they are due after a step. An outcome: the run ends here."""
        config, last = self.config, step == self.config.steps
        saves = ending is not None or last or is_due(step, config.checkpoint.every)
        if ending is None and (last or is_due(step, config.evaluate.every)):
            saves |= self._evaluate(step) and config.checkpoint.keep_best is not None
        if ending is None and not last and self._stops_early(step):
            ending = self._outcome(0, step, "")
        if saves or ending is not None:
            self.watchdog.beat(f"saving after step {step}")
            done = ending.step if ending else step
            try:
                self.keeper.save(done, self._extra())
            except NotFinite as error:
                self._event("not saved", f"{error.what}: {error.seen}", step)
                why = f"{ending.why}; " if ending else ""
                good = self.start if self.keeper.saved is None else self.keeper.saved
                ending = self._outcome(NOT_FINITE, good, f"{why}{error.what}: {error.seen}")
        if ending is not None or last:
            if self.keeper.on_error == "go_on":  # nothing comes after this one
                self.keeper.on_error = "stop"
            self.keeper.wait()
            self.watchdog.beat("ending")
        return ending

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint says of this run."""
        return {
            "data": self.task.fingerprint,
            "starts_from": self.task.starts_from,
            "early_stopping": [self.best, self.not_better],
            "best_step": self.keeper.best,
            "config": self.config.model_dump(mode="json"),
        }

    def _stops_early(self, step: int) -> bool:
        """Whether the held-out loss has not become lower for long enough; the same on all ranks."""
        patience = self.config.evaluate.patience
        if patience is None or self.not_better < patience:
            return False
        lowest = "finite one" if self.best is None else f"{self.best:.4f}"
        self._event("stopped early", f"no held-out loss below {lowest} in {self.not_better} evaluations", step)
        return True

    def _missed_evaluation(self, step: int) -> bool:
        """Whether a run ended, or a rank died, before the evaluation of the step that it resumes from was written."""
        if step == 0 or (step != self.config.steps and not is_due(step, self.config.evaluate.every)):
            return False
        lines = journal.read(self.config.folder / "metrics.jsonl") if self.log is not None else ()
        found = any(line.get("event") == "evaluation" and line.get("step") == step for line in lines)
        return _any_rank(self.mesh, self.log is not None and not found)

    def _evaluate(self, step: int) -> bool:
        """Evaluate on the held-out rows; returns whether no earlier loss of them was as low."""
        with averaged(self.task.engine):
            found = self.task.evaluate(self.watchdog.beat)
        better = found is not None and found.loss < (math.inf if self.best is None else self.best)
        if found is not None:
            self.not_better = 0 if better else self.not_better + 1
            self.best = found.loss if better else self.best
            if better and step and self.config.checkpoint.keep_best:
                self.keeper.best = step
            if self.copies is not None:
                self.copies.extra.update(self._extra())
        if self.log is not None and found is not None:
            about = {"loss": found.loss, "weight": found.weight, "unit": self.task.unit} | found.more
            self.log.write(step=step, event="evaluation", **about)
        return better

    def _show(self, step: int, steps: int, seconds: float, stats: Stats, rate: float) -> None:
        mine = torch.tensor([most_memory(self.mesh.device), self.waited], dtype=torch.float64, device=self.mesh.device)
        worst = raw.all_max(mine, self.mesh.group("world")).tolist()
        self.waited = 0.0
        shares = peers.expert_load(self.task.model, self.mesh)
        if self.log is None:
            return
        speed = steps * self.task.per_step / seconds
        ranks = self.mesh.layout.world_size
        usage = speed * self.task.flops / (self.peak * ranks) if self.peak else None
        left = (self.config.steps - step) * seconds / steps
        self.log.write(
            step=step, steps=self.config.steps, loss=stats.loss, grad_norm=stats.grad_norm, lr=rate,
            unit=self.task.unit, weight=stats.weight, per_s=speed, per_s_rank=speed / ranks, mfu=usage,
            memory_gb=worst[0] / 2**30, data_wait=min(1.0, worst[1] / seconds), eta_s=left, skipped=stats.skipped,
            seconds_per_step=seconds / steps, **self.log.worked(seconds),
            **journal.of_terms(stats.terms), **({"load": shares} if shares else {}),
        )  # fmt: skip

    def _finish(self, step: int) -> RunOutcome:
        """A picture and a sample, once everything is safe on disk."""
        if self.start >= self.config.steps and self.options.recovery is None:
            self._event("done", f"nothing to do: all {self.config.steps} steps were done before", step)
            return self._outcome(0, step, "")
        self.watchdog.beat("finishing")
        with averaged(self.task.engine):
            text = self.task.finish(self.config.log.sample)
        if text is not None:
            self._event("model", text, step)
        if self.mesh.rank == 0:
            folder = self.config.folder
            picture = folder / "loss.png"
            drawn = plots.curves({folder.name: journal.curve(folder / "metrics.jsonl")}, picture, folder.name)
            self._event("picture", f"loss curve: {picture}" if drawn else
                        "no loss curve: pip install matplotlib for one", step)  # fmt: skip
        return self._outcome(0, step, "")


def _no_data(error: Exception) -> DataError:
    return DataError("IG918", seen=headline(error), doing="preparing data")


def _any_rank(mesh: Mesh, mine: bool) -> bool:
    """Whether it is true on any rank; the same answer on all of them."""
    return bool(raw.all_max(torch.tensor([float(mine)], device=mesh.device), mesh.group("world")).item())
