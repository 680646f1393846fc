"""After a death: those that are left write the copies they hold as a checkpoint, which the next world resumes from.

A checkpoint can be loaded under any layout, its hashes are checked, and it outlives a second death. So this is the only
way in which state comes from one world into the next, whatever layout and number of ranks that has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isograd.checkpoint import folder as folders
from isograd.checkpoint.write import Job, finish
from isograd.errors import IsogradError
from isograd.resilience import copies
from isograd.resilience.copies import Offer
from isograd.resilience.crew import Crew


@dataclass(frozen=True)
class Found:
    """The copies of a step that together are its whole state, and which member writes the rows of which ranks."""

    world: str
    step: int
    ranks: int
    writers: dict[int, list[int]]


def newest(offers: Mapping[int, Sequence[Offer]]) -> Found | None:
    """offers: by member. The last step of which the rows of every rank are held; None: there is none."""
    held: dict[tuple[int, str, int], dict[int, list[int]]] = {}  # {step: {rank: members}}
    for member, said in offers.items():
        for offer in said:
            by_rank = held.setdefault((offer.step, offer.world, offer.ranks), {})
            for rank in offer.of:
                by_rank.setdefault(rank, []).append(member)
    whole = [key for key, by_rank in held.items() if len(by_rank) == key[2]]
    if not whole:
        return None
    step, world, ranks = best = max(whole)
    writers: dict[int, list[int]] = {}
    for rank, members in sorted(held[best].items()):
        writer = min(members, key=lambda member: len(writers.get(member, ())))
        writers.setdefault(writer, []).append(rank)
    return Found(world, step, ranks, writers)


def rescue(
    crew: Crew, offers: Mapping[int, Sequence[Offer]], folder: Path, keep_last: int, keep_every: int | None
) -> str:
    """Make the newest copies a checkpoint. Says what was done, or why nothing was."""
    saved = folders.checkpoints(folder)
    behind = f"back to the checkpoint of step {saved[-1][0]}" if saved else "back to the first step"
    died = 0
    while (found := newest(offers)) is not None and not (saved and saved[-1][0] >= found.step):
        try:
            whole = _write(crew, found, folder, keep_last, keep_every)
        except (OSError, IsogradError) as error:
            return f"{behind}, as the copies of step {found.step} could not be written: {error}"
        if whole:
            more = f", of which {died} more died while they wrote it" if died else ""
            return f"the state after step {found.step} was held by those that are left{more}"
        alive = {member: said for member, said in offers.items() if crew.members[member].code is None}
        died += len(offers) - len(alive)
        offers = alive
    return behind + (f", as {died} more died while they wrote copies" if died else "")


def _write(crew: Crew, found: Found, folder: Path, keep_last: int, keep_every: int | None) -> bool:
    """Make these copies a checkpoint; False: a member has died while it wrote its part."""
    place = folders.partial(folder, found.step, "rescue")
    folder.mkdir(parents=True, exist_ok=True)
    lock = folders.Lock(folder, "rescue")
    try:
        folders.sweep(folder)
        place.mkdir()
        jobs = {
            member: (copies.write, (found.world, found.step, ranks, folder, place))
            for member, ranks in found.writers.items()
        }
        heads = crew.ask(jobs)
        if len(heads) < len(jobs):
            return False
        head = copies.joined(heads.values())
        finish(
            Job(folder, place, found.step, 0, found.ranks, head, (), {}, keep_last, keep_every, lambda _: None),
            lambda: None,
        )
        return True
    finally:
        lock.close()
