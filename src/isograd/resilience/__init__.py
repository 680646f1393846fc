"""Runs that survive the death of a rank: the step that it interrupts is done again, on the same samples.

    crew.py       the launcher's side: processes that are ranks of one world after another
    member.py     a rank's side: leaves a world that has lost a rank, without dying
    copies.py     what a rank writes into a checkpoint, held by a partner too
    rooms.py      memory that outlives the process that fills it
    replicas.py   the state of ranks that all hold the same, which needs no copy
    rescue.py     after a death: those copies become a checkpoint
    smaller.py    a layout for fewer ranks
    recovery.py   how long each part of it took
    progress.py   what a survivor can say of the world that ended

train/survive.py puts them together.
"""

from isograd.resilience.copies import Copies, offers
from isograd.resilience.crew import Attempt, Crew
from isograd.resilience.progress import reached
from isograd.resilience.recovery import Recovery

__all__ = ["Attempt", "Copies", "Crew", "Recovery", "offers", "reached"]
