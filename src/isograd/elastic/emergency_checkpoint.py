"""After a death: those that are left write the copies they hold as a checkpoint, which the next world resumes from.

A checkpoint can be loaded under any layout, its hashes are checked, and it outlives a second death. So this is the only
way in which state comes from one world into the next, whatever layout and number of ranks that has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isograd.checkpoint import folder as folders
from isograd.checkpoint.write import SaveJob, finish
from isograd.elastic import copies
from isograd.elastic.copies import Offer
from isograd.errors import IsogradError
from isograd.io.store import Place

# Lets workers do a job each: (their values, how each of those died that did). `WorkerPool.ask` is one.
Ask = Callable[[Mapping[int, tuple[Callable[..., Any], tuple[Any, ...]]]], tuple[dict[int, Any], dict[int, str]]]


@dataclass(frozen=True)
class CompleteCopies:
    """The copies of a step that together are its whole state, and which worker writes the rows of which ranks."""

    world: str
    step: int
    ranks: int
    writers: dict[int, list[int]]


def newest(offers: Mapping[int, Sequence[Offer]]) -> CompleteCopies | None:
    """offers: by worker. The last step of which the rows of every rank are held; None: there is none."""
    held: dict[tuple[int, str, int], dict[int, list[int]]] = {}  # {step: {rank: workers}}
    for worker, said in offers.items():
        for offer in said:
            by_rank = held.setdefault((offer.step, offer.world, offer.ranks), {})
            for rank in offer.of:
                by_rank.setdefault(rank, []).append(worker)
    whole = [key for key, by_rank in held.items() if len(by_rank) == key[2]]
    if not whole:
        return None
    step, world, ranks = best = max(whole)
    writers: dict[int, list[int]] = {}
    for rank, workers in sorted(held[best].items()):
        writer = min(workers, key=lambda worker: len(writers.get(worker, ())))
        writers.setdefault(writer, []).append(rank)
    return CompleteCopies(world, step, ranks, writers)


def save_copies(
    ask: Ask, offers: Mapping[int, Sequence[Offer]], folder: Place, keep_last: int, keep_every: int | None
) -> str:
    """Make the newest copies a checkpoint. Says what was done, or why nothing was."""
    saved = folders.checkpoints(folder)
    behind = f"back to the checkpoint of step {saved[-1][0]}" if saved else "back to the first step"
    died: list[str] = []
    while (found := newest(offers)) is not None and not (saved and saved[-1][0] >= found.step):
        try:
            lost = _write(ask, found, folder, keep_last, keep_every)
        except (OSError, IsogradError) as error:
            return f"{behind}, as the copies of step {found.step} could not be written: {error}"
        died += lost.values()
        if not lost:
            more = f", of which more died while they wrote it: {'; '.join(died)}" if died else ""
            return f"the state after step {found.step} was held by those that are left{more}"
        offers = {worker: said for worker, said in offers.items() if worker not in lost}
    return behind + (f", as more died while they wrote copies: {'; '.join(died)}" if died else "")


def _write(ask: Ask, found: CompleteCopies, folder: Place, keep_last: int, keep_every: int | None) -> dict[int, str]:
    """Make these copies a checkpoint, unless a worker dies while it writes its part: who, then, and how."""
    job = folders.job_name()
    place = folders.partial(folder, found.step, job)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folders.Lock(folder, job)
    try:
        folders.sweep(folder)
        place.mkdir()
        jobs = {
            worker: (copies.write, (found.world, found.step, ranks, folder, place))
            for worker, ranks in found.writers.items()
        }
        heads, died = ask(jobs)
        if died:
            return died
        head = copies.joined(heads.values())
        finish(
            SaveJob(folder, place, found.step, 0, found.ranks, head, (), {}, keep_last, keep_every, lambda _: None),
            lambda: None,
        )
        return {}
    finally:
        lock.close()
