"""Pipelines side by side: torch.distributed.pipelining's schedules and isograd's, on the same stages.

    python -m benchmarks.pipeline                       # 2 ranks, 8 micro-batches, some minutes on two cores
    python -m benchmarks.pipeline --ranks 4 --only "one process" "*1f1b" "*interleaved*"

Every rank is given the whole batch; one process works through it in one piece. The columns are those of
benchmarks.data_parallel, and "of its peer" compares isograd with the same schedule of torch. The wire's lower bound is
the stream of every token from stage to stage, and its gradient back. "bubble" is the share of the ranks' time in which
they waited, in torch's and in isograd's; "theory" is what the schedule costs if each action takes as long as it took
and messages take no time. With --no-errors the floors of two schedules race, too (benchmarks.floors).
"""

from __future__ import annotations

import dataclasses

from benchmarks import floors, pipeline_ours, pipeline_peers, report
from benchmarks.contestant import ONE
from benchmarks.task import Sizes

if __name__ == "__main__":
    parser = report.options(__doc__ or "")
    parser.add_argument("--micro-batches", type=int, default=Sizes().micro_batches, help="per step")
    chosen = parser.parse_args()
    if chosen.batch % chosen.micro_batches:
        raise SystemExit(f"--batch {chosen.batch} cannot be cut into {chosen.micro_batches} equal micro-batches")
    sizes = dataclasses.replace(Sizes(), batch=chosen.batch, micro_batches=chosen.micro_batches)
    bottom = floors.PIPELINE if chosen.no_errors else []  # they have no gradients to compare
    entries = report.chosen_of([ONE, *bottom, *pipeline_peers.PEERS, *pipeline_ours.PIPELINE], chosen.only)
    note = f"{chosen.micro_batches} micro-batches per step"
    report.contest("pipeline", entries, sizes, chosen, [note])
