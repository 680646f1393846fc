"""Data parallelism side by side: one process, torch DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed, isograd's ZeRO 0-3.

    python -m benchmarks.data_parallel                  # 2 ranks, about five minutes on two cores
    python -m benchmarks.data_parallel --ranks 4 --rounds 3
    python -m benchmarks.data_parallel --only DDP zero1 --no-errors
    python -m benchmarks.data_parallel --only "one process" "FSDP2 *" "zero3*"     # parameters as shards

"best" is the fastest turn. "of DDP", "of one" and "of its peer" are times relative to DDP's, one process's and the turn
of what it stands beside, in the same round (median over rounds); "work of ..." is the same of the CPU time of the rank
that works most, which a loaded machine stretches less than the clock's. "wire" is what a rank's own sockets send in a
step, beside the least that the method must send; the loopback interface's count stands in the JSON, and a note under
the table says how many turns other jobs disturbed in every attempt. "peak" is resident memory above that of the process
before it built the model, of the rank that needs most. "error" is the relative difference of the whole gradient from
one process on the whole batch: with as many labels on each rank, and with uneven numbers.
"""

from __future__ import annotations

from benchmarks import data_peers, ours, report
from benchmarks.contestant import ONE

NOTES = [] if data_peers.HAS_DEEPSPEED else ["DeepSpeed ZeRO 0-3 left out: the package is not installed"]

if __name__ == "__main__":
    report.main("data_parallel", __doc__ or "", [ONE, *data_peers.PEERS, *ours.DATA], NOTES)
