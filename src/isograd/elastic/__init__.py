"""Runs that survive the death of a rank: the step that it interrupts is done again, on the same samples.

    worker_pool.py           the launcher's side: processes that are ranks of one world after another
    worker.py                a rank's side: leaves a world that has lost a rank, without dying
    copies.py                what a rank writes into a checkpoint, held by a partner too
    shared_memory.py         memory that outlives the process that fills it
    replicas.py              the state of ranks that all hold the same, which needs no copy
    emergency_checkpoint.py  after a death: those copies become a checkpoint
    progress.py              what a survivor can say of the world that ended, and how long each part of it took
    preflight.py             before a run: do its machines reach each other

train/run/survive.py puts them together.
"""

from isograd.elastic.copies import Copies, offers
from isograd.elastic.progress import Recovery, process_progress
from isograd.elastic.worker_pool import Attempt, WorkerPool

__all__ = ["Attempt", "Copies", "Recovery", "WorkerPool", "offers", "process_progress"]
