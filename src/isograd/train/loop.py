"""The loop of a run, on one rank: train, evaluate, save, show, and end cleanly.

    0    done                        75   asked to stop (signal or STOP file): saved, --resume auto continues
    6    NaN or Inf, not saved        7   no progress: a silent rank or a lost connection (stall.py)

One small exchange a step tells all ranks whether anyone was asked to stop, so that they end after the same step.
"""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isograd import inside, random
from isograd.checkpoint import Keeper, NotFinite
from isograd.comm import raw, worker
from isograd.comm.agree import all_or_none
from isograd.engine import Stats
from isograd.errors import DataError, TrainError, headline
from isograd.mesh import Mesh
from isograd.resilience import Copies, Recovery, reached
from isograd.train import curves, grow, journal, load, peers
from isograd.train.config import Config
from isograd.train.corrupted import Checks
from isograd.train.devices import peak_flops
from isograd.train.early import refuse_earlier_run
from isograd.train.job import Job, make_job, prepare
from isograd.train.optimizers import Schedule
from isograd.train.orphan import last_words
from isograd.train.pulse import Pulse
from isograd.train.reading import written
from isograd.train.stall import Watchdog, patience
from isograd.train.stop import SIGNALS, STOPPED, Asked, Wish
from isograd.train.trackers import trackers

NOT_FINITE = 6
MAY_CHANGE = "steps", "model", "optimizer", "pairs", "preference"  # and are told, when a run resumes
MOST_SKIPPED = 20  # steps in a row


@dataclass
class Outcome:
    """How a run ended; equal on all ranks, apart from `why` of a wish to stop."""

    code: int
    step: int  # how many were done in all
    why: str = ""
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    sent: int = 0  # bytes that left this rank in its steps, where `Orders.sent` counts them


@dataclass(frozen=True)
class Orders:
    """What the command line adds to a config."""

    resume: str = "auto"  # a path, "auto" or "never"
    show: str = "lines"  # "live", "json" or "none"
    until: int | None = None  # end after this step, as if asked to stop; None: at the end
    signals: tuple[Any, ...] = SIGNALS  # which this rank takes as requests to stop
    passed_on: Path | None = None  # the launcher makes this file when it is asked to stop
    before_step: Callable[[int, Job], None] | None = None  # for tests that break things
    notes: tuple[tuple[str, str], ...] = ()  # what the launcher has to say: (event, text), each of a world before
    recovery: Recovery | None = None  # from the last of them; it ends with the first step
    grows: bool | None = None  # whether the run has fewer ranks than its layout, so that a file GROW ends this world
    sent: Callable[[], int] | None = None  # counts the bytes that have left this rank so far


def run(config: Config, orders: Orders, asked: Asked | None = None) -> Outcome:
    """Train by a config on this rank, which joins the world of the others; all ranks of it call this.

    asked: what has noted signals since the process began; without it `orders.signals` are noted from here on.
    """
    stall_s = config.safety.stall_s
    with ExitStack() as stack:
        raw.be_patient(patience(stall_s))
        rescued = config.resilience.after_death != "end"
        dog = Watchdog(config.folder, *raw.seat(), stall_s, config.resilience.wait_s if rescued else 0.0)
        stack.callback(dog.close)
        stack.callback(lambda: setattr(reached, "phase", dog.phase))
        first = raw.seat()[0] == 0  # one speaks, also between this world and the next
        worker.when_orphaned(partial(last_words, config.folder, lambda: dog.phase) if first else None)
        mesh = Mesh(config.layout)
        pulse = Pulse(mesh.rank, mesh.layout.world_size, config.resilience.network_s)
        dog.joined(mesh.where(), peers.hosts(mesh), pulse)
        peers.same_config(written(config), mesh)
        if orders.recovery is not None:
            orders.recovery.done("ranks joined")
        journal.make_folder(config.folder)
        if mesh.rank == 0:
            journal.leave_code(config.folder, None)
        if asked is None:
            asked = Asked(orders.signals)
            stack.callback(asked.close)
        wish = Wish(config.folder, asked, looks=mesh.rank == 0, passed_on=orders.passed_on, grows=orders.grows)
        dog.beat("preparing data")
        all_or_none(lambda: prepare(config) if mesh.rank == 0 else None, mesh, DataError, _no_data)
        if _any_rank(wish.heard(), mesh):
            outcome = Outcome(STOPPED, 0, wish.why or "asked to stop")
        else:
            dog.beat("building the model")
            outcome = _Run(config, mesh, orders, dog, wish, stack).go()
        wish.done()
        if mesh.rank == 0:
            journal.leave_code(config.folder, outcome.code)
        return outcome


class _Run:
    def __init__(self, config: Config, mesh: Mesh, orders: Orders, dog: Watchdog, wish: Wish, stack: ExitStack) -> None:
        self.config, self.mesh, self.orders, self.dog, self.wish = config, mesh, orders, dog, wish
        seed_generators(config, mesh)
        self.job = make_job(config, mesh, dog.beat)
        self._part("model built")
        keep = config.checkpoint
        self.keeper = Keeper(
            config.folder / "checkpoints", self.job.engine, keep_last=keep.keep_last, keep_every=keep.keep_every,
            beat=dog.beat,
        )  # fmt: skip
        stack.enter_context(self.keeper)
        dog.before_end = self.keeper.let_finish
        self.checks = Checks(config, self.job.engine, partial(self._event, "corrupted"))
        self.passed_over: tuple[str, ...] = ()
        self.differs: list[str] = []  # options that may change on resume, and have
        self.schedule = Schedule(config.optimizer, self.job.engine.optimizer, config.steps)
        self.start = self.saved = self._resume()  # `saved`: the step of the newest checkpoint that is good
        reached.finished(self.start)
        self._part("state loaded")
        self.copies: Copies | None = None
        after = config.resilience
        if after.after_death != "end" and mesh.layout.world_size > 1:
            self.copies = Copies(self.job.engine, config.run, self._extra(), partner=after.copies == "partner")
            stack.push(self._close_copies)
            self.checks.from_copy = self.copies.restore
        self.log: journal.Journal | None = None
        if mesh.rank == 0:
            self._open_journal(stack)
        self.peak = peak_flops(mesh.device, config)
        self.skipped = self.skipped_in_a_row = 0
        self.losses: list[float] = []
        self.sent = 0  # bytes, in steps
        self.waited = 0.0
        self.paused = 0.0  # seconds of evaluation and saving since the last line

    def _close_copies(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self.copies is not None
        self.copies.close(failed=kind is not None)

    def _resume(self) -> int:
        if self.orders.resume == "never":
            refuse_earlier_run(self.config.folder)
            return 0
        groups = self.job.engine.optimizer.param_groups
        ours = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        with warnings.catch_warnings():  # of damage, which the log tells, too
            warnings.filterwarnings("ignore", message="loaded step-")
            found = self.keeper.load(self.orders.resume)
        if found is None:
            return 0
        for group, values in zip(groups, ours, strict=True):
            group.update(values)  # decay rates and such are the config's, not the checkpoint's
        if found.extra.get("data") not in (None, self.job.fingerprint):
            raise TrainError(
                "IG986", "the checkpoint was trained on other data, or in another order",
                seen="; ".join([str(found.path), *changed(found.extra.get("config"), self.config)]),
                expected="the same sources, length, batch and seed, so that no sample is seen twice or never",
                fix="restore these values; or export the checkpoint (isograd ckpt convert) and start a new run "
                "from its weights (model.path)",
                where=self.mesh.where(),
            )  # fmt: skip
        before = found.extra.get("starts_from")  # None: an older isograd's; empty: of a loss without references
        if before and self.job.starts_from not in ("", before):
            raise TrainError(
                "IG986", "the checkpoint's run began from another model, with which its loss compares",
                seen=f"{found.path}; other weights in model.path, or other values of `model`",
                expected="the model that the run began from, which gives the references",
                fix="restore the files of model.path and `model`; or start a new run from this model (--run FOLDER)",
                where=self.mesh.where(),
            )  # fmt: skip
        self.passed_over = found.passed_over
        self.differs = differing(found.extra.get("config"), self.config, MAY_CHANGE)
        return found.step

    def _open_journal(self, stack: ExitStack) -> None:
        folder = self.config.folder
        inside.replace_text(folder / "config.yaml", f"{journal.WRITTEN}\n{written(self.config)}")
        sinks: list[Callable[[dict[str, Any]], None]] = trackers(self.config, folder, stack)
        if self.orders.show == "live":
            live = journal.Live()
            stack.callback(live.close)
            sinks.append(live)
        elif self.orders.show != "none":
            sinks.append(journal.as_json if self.orders.show == "json" else journal.plain)
        self.log = journal.Journal(folder / "metrics.jsonl", self.start, sinks)
        stack.callback(self.log.close)
        if self.job.lacks:
            self._event("note", self.job.lacks, self.start)
        if self.orders.notes:
            known = Counter(line.get("text") for line in journal.read(folder / "metrics.jsonl"))
            for event, text in self.orders.notes:
                known[text] -= 1  # a rank may die twice in the same way
                if known[text] < 0:
                    self._event(event, text, self.start)
        if self.start:
            text = f"resumed from the checkpoint of step {self.start}"
            text += f"; newer ones are damaged: {'; '.join(self.passed_over)}" if self.passed_over else ""
            text += f"; with other options: {'; '.join(self.differs)}" if self.differs else ""
            self._event("resumed", text, self.start)

    def _part(self, name: str) -> None:
        if self.orders.recovery is not None:
            self.orders.recovery.done(name)

    def _event(self, event: str, text: str, step: int, **more: Any) -> None:
        if self.log is not None:
            self.log.write(step=step, event=event, text=text, **more)

    def go(self) -> Outcome:
        step = self.start
        if early := self._stopping(step):
            return early
        if (self.config.evaluate.first and step == 0) or self._missed_evaluation(step):
            self._evaluate(step)
        began, at = time.perf_counter(), step
        for batch in self._batches(step):
            rate = self.schedule.set(step)
            before = self._sent()
            stats = self.checks.step(step + 1, batch, partial(self._gather, step, batch))
            self.sent += self._sent() - before
            self.dog.stepped()
            step += 1
            reached.finished(step)
            if step == self.start + 1 and (recovery := self.orders.recovery) is not None:
                recovery.done("step")
                self._event("recovered", str(recovery), self.start, parts=recovery.seconds)
            self.losses.append(stats.loss)
            ending = self._not_finite(stats, step)
            if step % self.config.log.every == 0 or step in (self.start + 1, self.config.steps) or stats.skipped:
                now = time.perf_counter()
                self._show(step, step - at, now - began - self.paused, stats, rate)
                began, at, self.paused = now, step, 0.0
            if self.copies is not None:  # after the journal's line: a step that outlives a death has its line
                self.dog.beat(f"copying after step {step}")
                self.copies.start(step)
            pause = time.perf_counter()
            ending = ending or self._stopping(step)
            ending = self._care(step, ending) or ending
            self.paused += time.perf_counter() - pause
            if ending:
                return ending
        return self._finish(step)

    def _sent(self) -> int:
        return 0 if self.orders.sent is None else self.orders.sent()

    def _gather(self, step: int, batch: Any) -> None:
        self.dog.beat(f"in step {step + 1}, forward and backward")
        if self.orders.before_step is not None:
            self.orders.before_step(step, self.job)
        self.job.accumulate(batch)
        self.checks.check_seal()
        self._compare(step + 1)
        if self.copies is not None:
            self.dog.beat(f"in step {step + 1}, waiting for copies")
            self.copies.finish()
        self.dog.beat(f"in step {step + 1}, optimizer")

    def _batches(self, first: int) -> Iterator[dict[str, Any]]:
        """Read one step ahead, in a thread: reading is no part of a step."""
        with ThreadPoolExecutor(1, "isograd data") as reader:
            coming: Future[dict[str, Any]] | None = None
            for step in range(first, self.config.steps):
                batch = coming or reader.submit(self.job.batch, step)
                began = time.perf_counter()
                ready = batch.result()
                self.waited += time.perf_counter() - began
                coming = reader.submit(self.job.batch, step + 1) if step + 1 < self.config.steps else None
                yield ready

    def _not_finite(self, stats: Stats, step: int) -> Outcome | None:
        if not stats.skipped:
            self.skipped_in_a_row = 0
            return None
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        if self.job.engine.loss_scale is not None and self.skipped_in_a_row < MOST_SKIPPED:
            return None  # how a loss scale finds its place
        whose = f"not finite: {self.job.engine.blame}"
        self._event("skipped", whose, step)
        if self.config.safety.not_finite == "skip" and self.skipped_in_a_row < MOST_SKIPPED:
            return None
        return self._outcome(NOT_FINITE, step - 1, f"step {step}: {whose}; no rank stepped")

    def _stopping(self, step: int) -> Outcome | None:
        if self.wish.in_vain():
            self._event(grow.EVENT, grow.IN_VAIN, step)
        until = self.orders.until
        ends = self.wish.heard() or (until is not None and step >= until)
        if step == self.config.steps or not _any_rank(ends, self.mesh):
            return None
        return self._outcome(STOPPED, step, self.wish.why or "asked to stop")

    def _outcome(self, code: int, step: int, why: str) -> Outcome:
        return Outcome(code, step, why, self.skipped, self.losses, self.sent)

    def _compare(self, step: int) -> None:
        """Before the optimizer writes: at ZeRO 1 and 2 its step overwrites every copy."""
        every = self.config.safety.replicas_every
        saves = step == self.config.steps or _due(step, self.config.checkpoint.every)
        if every and (saves or step % every == 0):
            self.dog.beat(f"comparing copies in step {step}")
            peers.equal_copies(self.job.engine, step)

    def _care(self, step: int, ending: Outcome | None) -> Outcome | None:
        """Evaluate and save when they are due after a step. An outcome: the state is not finite."""
        config, last = self.config, step == self.config.steps
        saves = ending is not None or last or _due(step, config.checkpoint.every)
        if ending is None and (last or _due(step, config.evaluate.every)):
            self._evaluate(step)
        if saves:
            self.dog.beat(f"saving after step {step}")
            done = ending.step if ending else step
            try:
                self.keeper.save(done, self._extra())
            except NotFinite as error:
                self._event("not saved", f"{error.what}: {error.seen}", step)
                why = f"{ending.why}; " if ending else ""
                ending = self._outcome(NOT_FINITE, self.saved, f"{why}{error.what}: {error.seen}")
            else:
                self.saved = done
        if ending is not None or last:
            self.keeper.wait()
            self.dog.beat("ending")
        return ending

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint says of this run."""
        about = {"data": self.job.fingerprint, "starts_from": self.job.starts_from}
        return {**about, "config": self.config.model_dump(mode="json")}

    def _missed_evaluation(self, step: int) -> bool:
        """Whether a run ended, or a rank died, before the evaluation of the step that it resumes from was written."""
        due = step > 0 and (step == self.config.steps or _due(step, self.config.evaluate.every))
        if not due:
            return False
        lines = journal.read(self.config.folder / "metrics.jsonl") if self.log is not None else ()
        found = any(line.get("event") == "evaluation" and line.get("step") == step for line in lines)
        return _any_rank(self.log is not None and not found, self.mesh)

    def _evaluate(self, step: int) -> None:
        found = self.job.evaluate(self.dog.beat)
        if self.log is not None and found is not None:
            unit = self.job.unit
            self.log.write(step=step, event="evaluation", loss=found.loss, weight=found.weight, unit=unit, **found.more)

    def _show(self, step: int, steps: int, seconds: float, stats: Stats, rate: float) -> None:
        mine = torch.tensor([memory(self.mesh.device), self.waited], dtype=torch.float64, device=self.mesh.device)
        worst = raw.all_max(mine, self.mesh.group("world")).tolist()
        self.waited = 0.0
        shares = load.load_of(self.job.model, self.mesh)
        if self.log is None:
            return
        speed = steps * self.job.per_step / seconds
        ranks = self.mesh.layout.world_size
        usage = speed * self.job.flops / (self.peak * ranks) if self.peak else None
        left = (self.config.steps - step) * seconds / steps
        self.log.write(
            step=step, steps=self.config.steps, loss=stats.loss, grad_norm=stats.grad_norm, lr=rate,
            unit=self.job.unit, weight=stats.weight, per_s=speed, per_s_rank=speed / ranks, mfu=usage,
            memory_gb=worst[0] / 2**30, data_wait=min(1.0, worst[1] / seconds), eta_s=left, skipped=stats.skipped,
            seconds_per_step=seconds / steps, **journal.of_terms(stats.terms), **({"load": shares} if shares else {}),
        )  # fmt: skip

    def _finish(self, step: int) -> Outcome:
        """Pictures and a sample, once everything is safe on disk."""
        if self.start >= self.config.steps and self.orders.recovery is None:
            self._event("done", f"nothing to do: all {self.config.steps} steps were done before", step)
            return self._outcome(0, step, "")
        self.dog.beat("finishing")
        text = self.job.finish(self.config.log.sample)
        if text is not None:
            self._event("model", text, step)
        if self.mesh.rank == 0:
            picture = self.config.folder / "loss.png"
            name = self.config.folder.name
            drawn = curves.draw({name: self.config.folder / "metrics.jsonl"}, picture, name)
            self._event("picture", f"loss curve: {picture}" if drawn else
                        "no loss curve: pip install 'isograd[plot]' for one", step)  # fmt: skip
            heat = self.config.folder / "experts.png"
            if load.draw(self.config.folder / "metrics.jsonl", heat):
                self._event("picture", f"load of the experts: {heat}", step)
        return self._outcome(0, step, "")


def _no_data(error: Exception) -> DataError:
    return DataError(
        "IG918",
        "preparing data failed",
        seen=headline(error),
        expected="texts that can be read, and a folder that can be written, with enough space",
        fix="make room or fix permissions; the same command then resumes",
    )


def _any_rank(mine: bool, mesh: Mesh) -> bool:
    """Whether it is true on any rank; the same answer on all of them."""
    return bool(float(raw.all_max(torch.tensor([float(mine)], device=mesh.device), mesh.group("world"))))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def changed(before: object, now: Config) -> list[str]:
    """Which options decide a run's samples, and differ from those of the run that was saved."""
    if not isinstance(before, dict):
        return []
    found = differing(before, now, ("data", "pairs", "preference", "batch"))
    return found or ["the options are the same: what the files hold has changed"]


def differing(before: object, now: Config, names: Iterable[str]) -> list[str]:
    """Which of these parts of a config differ from those of the run that was saved, option by option."""
    ours, found = now.model_dump(mode="json"), list[str]()
    if not isinstance(before, dict):
        return found
    for name in names:
        old, new = before.get(name), ours[name]
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in new if old.get(key) != new[key]]
            found += [f"{name}.{key} was {old.get(key)!r} and is {new[key]!r}" for key in keys]
        elif old != new:
            found.append(f"{name} was {old!r} and is {new!r}")
    return found


def seed_generators(config: Config, mesh: Mesh) -> None:
    """Seed torch's own generators, which checkpoints hold: they are equal in two runs of one config, and on all ranks,
    as replicas.py asks for; unless an encoder's dropout draws from them, whose masks must differ between the ranks."""
    seed = config.pairs.seed if config.pairs is not None else config.data.seed if config.data is not None else 0
    own = mesh.rank if config.pairs is not None and config.pairs.dropout else 0
    torch.manual_seed(random.key(seed, "generators", own).seed)


def memory(device: torch.device) -> float:
    """The most bytes this rank has held."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
