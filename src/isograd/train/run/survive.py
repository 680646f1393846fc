"""A run whose ranks are started here goes on when some of them die (`resilience` in the config).

a rank dies       the launcher sees its process end; the others see broken connections, drop the step, and wait
its state         is in copies.py's copies, which become a checkpoint; without them: the last checkpoint
the next world    the same layout with the dead replaced, or a smaller one; it resumes as any run resumes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from isograd.checkpoint.folder import checkpoints
from isograd.core.layout import Layout
from isograd.elastic import Attempt, Recovery, WorkerPool, offers, process_progress
from isograd.elastic.copies import Offer
from isograd.elastic.emergency_checkpoint import Ask, save_copies
from isograd.errors import LaunchError
from isograd.launcher.launch import exit_words
from isograd.train import journal
from isograd.train.config import Config
from isograd.train.loop import RunOptions, RunOutcome, run
from isograd.train.run import signals

ENDS_SURVIVAL = ("IG255", "IG256")  # of this file: no watchdog has said anything about it


def survive(config: Config, options: RunOptions, pool: WorkerPool) -> RunOutcome:
    """Train; start worlds until one of them comes to an end without a death."""
    layout, most, without_progress = Layout.parse(config.layout), -1, 0
    whole, code = config, signals.source_hashes()
    options = replace(options, grows=False)
    pool.fill(layout.world_size)
    while True:
        attempt = pool.attempt(layout.world_size, run, config, options)
        if attempt.values is not None:
            outcome: RunOutcome = attempt.values[0]
            if outcome.why != signals.GROWS:
                return outcome
            (config.folder / signals.GROW).unlink(missing_ok=True)
            why = signals.changed_sources(code)
            if not why:
                config, layout = whole, Layout.parse(whole.layout)
                pool.fill(layout.world_size)
            text = f"no rank joins: {why}" if why else f"ranks have come back: going on as {str(layout)!r}"
            journal.tell(text)
            notes = (*options.notes, (signals.GROW_EVENT, text))
            options = replace(options, resume="auto", notes=notes, recovery=None, grows=config != whole)
            continue
        recovery = Recovery(attempt.seen)
        recovery.done("others left")
        said, died = pool.ask(dict.fromkeys(range(len(pool.workers)), (_report, (config.run,))))
        done = max(most, attempt.finished or 0)
        without_progress = 0 if done > most else without_progress + 1
        most = done
        left = layout.world_size - len(attempt.dead)  # the workers behind them were in no world
        phases = sorted({phase for worker, (phase, _) in said.items() if worker < left})
        text = "; ".join((_who(attempt, layout), *died.values(), _others(attempt, phases)))
        if without_progress >= config.resilience.tries:
            raise LaunchError(
                "IG255", f"ranks died {without_progress + 1} times without a new step in between", seen=text,
                expected=f"step {most + 1} to be finished",
                fix="what dies at the same place each time is no accident of a machine, but memory or a bug: see the "
                "kernel's log; the same command resumes",
            )  # fmt: skip
        journal.tell(text)
        text += f"; {state_of(config, pool.ask, {worker: found for worker, (_, found) in said.items()})}"
        recovery.done("state written")
        config, layout, how = _next(config, layout, pool, text, anew=attempt.server is not None)
        text += f"; {how}"
        # Once this run has a checkpoint of its own, that; else what it was started from.
        resume = "auto" if checkpoints(config.checkpoints) or options.resume == "never" else options.resume
        # The log of the next world tells the whole sentence.
        notes = (*options.notes, ("death", text))
        options = replace(options, resume=resume, notes=notes, recovery=recovery, grows=config != whole)


def _report(run: str) -> tuple[str, list[Offer]]:
    return process_progress.phase, offers(run)


def _who(attempt: Attempt, layout: Layout) -> str:
    if attempt.server is not None:
        return f"the server that starts ranks has died (its process {attempt.server} is gone), so its ranks were ended"
    words = []
    for rank, code in attempt.dead.items():
        spots = " ".join(f"{a}{i}" for a, i in layout.coordinates(rank).items() if layout.size(a) > 1)
        late = " by the launcher, as it did not notice the death of another rank" if rank in attempt.late else ""
        if rank in attempt.silent:
            doing = attempt.silent[rank]
            late = " by the launcher, as " + (f"it was silent ({doing})" if doing else "it gave no sign of life")
        words.append(f"rank {rank}{f' ({spots})' if spots else ''} was {exit_words(code)}{late}")
    return "; ".join(words)


def _others(attempt: Attempt, phases: list[str]) -> str:
    """What those did that are left; of a world of which nobody is left: how far it had come."""
    if phases:
        return f"the others were {' or '.join(phases)}"
    if attempt.finished is None:
        return "none was left; they had not begun to train"
    last = f"step {attempt.finished} was the last that was finished" if attempt.finished else "no step was finished"
    return f"none was left; {last}"


def state_of(config: Config, ask: Ask, held: dict[int, list[Offer]]) -> str:
    """Make the copies that workers hold a checkpoint, if they are whole; says what was done."""
    keep = config.checkpoint
    return save_copies(ask, held, config.checkpoints, keep.keep_last, keep.keep_every)


def _next(config: Config, layout: Layout, pool: WorkerPool, text: str, anew: bool) -> tuple[Config, Layout, str]:
    """(config, layout, how it goes on). anew: the ranks had no part in what ended them, so all of them are replaced."""
    pool.remove_dead()
    if anew or config.resilience.after_death == "replace":
        started = pool.fill(layout.world_size)
        return config, layout, f"{started} new process{'es' if started > 1 else ''} started"
    listed = [Layout.parse(each) for each in config.resilience.layouts]
    if len(pool.workers) >= layout.world_size:
        return config, layout, "a rank that was left over takes its place"
    found = shrunk_layout(layout, len(pool.workers), listed, lambda each: _cut(config, each) is not None)
    changed = _cut(config, found) if found is not None else None
    if found is None or changed is None:
        raise LaunchError(
            "IG256", f"no layout for the {len(pool.workers)} ranks that are left", seen=text,
            expected="one of resilience.layouts, or a part of the layout, of at most as many ranks",
            fix="the same command starts all ranks anew, and resumes from the last checkpoint; "
            "resilience.after_death: replace starts new ranks in place of those that die",
        )  # fmt: skip
    return changed, found, f"going on with {found.world_size} ranks as {str(found)!r}"


def shrunk_layout(
    layout: Layout, ranks: int, listed: Sequence[Layout], fits: Callable[[Layout], bool]
) -> Layout | None:
    """For at most `ranks` ranks. listed: the only ones that may be taken, if there are any; None: none fits.

    Without a list: as many ranks as possible, with every axis the same or a divisor of it. Such an axis cuts a model
    that the longer one cuts. `fits`: whether the batch can be cut so.
    """
    if listed:
        return next((each for each in listed if each.world_size <= ranks), None)
    for size in range(ranks, 0, -1):
        for each in layout.fits(size):
            divides = all(getattr(layout, axis) % getattr(each, axis) == 0 for axis in ("pp", "cp", "tp", "ep"))
            if divides and fits(each):
                return each
    return None


def _cut(config: Config, layout: Layout) -> Config | None:
    """The config under another layout, with micro-batches no larger than before; None: the batch cannot be cut so."""
    before = Layout.parse(config.layout)
    rows, rest = divmod(config.batch, layout.dp)
    if rest:
        return None
    largest = -(-(config.batch // before.dp) // config.micro_batches)
    micro_batches = config.micro_batches if config.pairs is not None else -(-rows // largest)
    changed: Config = config.model_copy(update={"layout": str(layout), "micro_batches": micro_batches})
    return changed
