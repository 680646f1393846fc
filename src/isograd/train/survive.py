"""A run whose ranks are started here goes on when some of them die (`resilience` in the config).

    a rank dies       the launcher sees its process end; the others see broken connections, drop the step, and wait
    its state         is in copies.py's copies, which become a checkpoint; without them: the last checkpoint
    the next world    the same layout with the dead replaced, or a smaller one; it resumes as any run resumes

Which samples a step has is a function of the data, the seed and the step. So the step that was interrupted is done
again on the same samples, and under the same layout with the same bits.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from isograd.checkpoint.folder import checkpoints
from isograd.comm.launch import exit_words
from isograd.errors import LaunchError
from isograd.layout import Layout
from isograd.resilience import Attempt, Crew, Recovery, offers, reached
from isograd.resilience.copies import Offer
from isograd.resilience.rescue import rescue
from isograd.resilience.smaller import smaller
from isograd.train import grow, journal
from isograd.train.config import Config
from isograd.train.loop import Orders, Outcome, run


def survive(config: Config, orders: Orders, crew: Crew) -> Outcome:
    """Train; start worlds until one of them comes to an end without a death."""
    layout, most, without_progress = Layout.parse(config.layout), -1, 0
    whole, code = config, grow.code()
    orders = replace(orders, grows=False)
    crew.fill(layout.world_size)
    while True:
        attempt = crew.attempt(layout.world_size, run, config, orders)
        if attempt.values is not None:
            outcome: Outcome = attempt.values[0]
            if outcome.why != grow.WHY:
                return outcome
            (config.folder / grow.FILE).unlink(missing_ok=True)
            why = grow.refused(code)
            if not why:
                config, layout = whole, Layout.parse(whole.layout)
                crew.fill(layout.world_size)
            text = f"no rank joins: {why}" if why else f"ranks have come back: going on as {str(layout)!r}"
            _tell(text)
            notes = (*orders.notes, (grow.EVENT, text))
            orders = replace(orders, resume="auto", notes=notes, recovery=None, grows=config != whole)
            continue
        recovery = Recovery(attempt.seen)
        recovery.done("others left")
        said = crew.ask(dict.fromkeys(range(len(crew.members)), (_report, (config.run,))))
        done = max(most, attempt.finished or 0)
        without_progress = 0 if done > most else without_progress + 1
        most = done
        left = layout.world_size - len(attempt.dead)  # the members behind them were in no world
        phases = sorted({phase for member, (phase, _) in said.items() if member < left})
        text = f"{_who(attempt, layout)}; {_others(attempt, phases)}"
        if without_progress >= config.resilience.tries:
            raise _given_up(text, without_progress, most)
        _tell(text)
        text += f"; {_state_of(config, crew, said)}"
        recovery.done("state written")
        config, layout, how = _next(config, layout, crew, text, anew=attempt.server is not None)
        text += f"; {how}"
        # The log of the next world tells the whole sentence.
        orders = replace(
            orders, resume=_resume(config, orders.resume), notes=(*orders.notes, ("death", text)), recovery=recovery,
            grows=config != whole,
        )  # fmt: skip


def _report(run: str) -> tuple[str, list[Offer]]:
    return reached.phase, offers(run)


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


def _state_of(config: Config, crew: Crew, said: dict[int, tuple[str, list[Offer]]]) -> str:
    keep = config.checkpoint
    held = {number: found for number, (_, found) in said.items()}
    return rescue(crew, held, config.folder / "checkpoints", keep.keep_last, keep.keep_every)


def _next(config: Config, layout: Layout, crew: Crew, text: str, anew: bool) -> tuple[Config, Layout, str]:
    """(config, layout, how it goes on). anew: the ranks had no part in what ended them, so all of them are replaced."""
    crew.bury()
    if anew or config.resilience.after_death == "replace":
        started = crew.fill(layout.world_size)
        return config, layout, f"{started} new process{'es' if started > 1 else ''} started"
    listed = [Layout.parse(each) for each in config.resilience.layouts]
    if len(crew.members) >= layout.world_size:
        return config, layout, "a rank that was left over takes its place"
    found = smaller(layout, len(crew.members), listed, lambda each: _cut(config, each) is not None)
    changed = _cut(config, found) if found is not None else None
    if found is None or changed is None:
        raise LaunchError(
            "IG256", f"no layout for the {len(crew.members)} ranks that are left", seen=text,
            expected="one of resilience.layouts, or a part of the layout, of at most as many ranks",
            fix="the same command starts all ranks anew, and resumes from the last checkpoint; "
            "resilience.after_death: replace starts new ranks in place of those that die",
        )  # fmt: skip
    return changed, found, f"going on with {found.world_size} ranks as {str(found)!r}"


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


def _resume(config: Config, before: str) -> str:
    """Once this run has a checkpoint of its own, that; else what it was started from."""
    return "auto" if checkpoints(config.folder / "checkpoints") or before == "never" else before


def _given_up(text: str, times: int, most: int) -> LaunchError:
    return LaunchError(
        "IG255", f"ranks died {times + 1} times without a new step in between", seen=text,
        expected=f"step {most + 1} to be finished",
        fix="what dies at the same place each time is no accident of a machine, but memory or a bug: see the kernel's "
        "log; the same command resumes",
    )  # fmt: skip


@journal.closed_terminal()
def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
