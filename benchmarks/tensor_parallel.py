"""Tensor parallelism side by side: torch's DTensor with and without SequenceParallel, and isograd's.

    python -m benchmarks.tensor_parallel                # 2 ranks, about five minutes on two cores
    python -m benchmarks.tensor_parallel --ranks 4 --rounds 3

Every rank sees the whole batch. One process and DDP run along for comparison. The columns are those of
benchmarks.data_parallel, and "of its peer" compares isograd with the same method in torch. The wire's lower bound is
the sums of the residual stream that the method is made of; the loss and norms' gradients add a little to it. With
--no-errors the floor of the method races, too (benchmarks.floors).
"""

from __future__ import annotations

import sys

from benchmarks import floors, ours, report, tensor_peers
from benchmarks.contestant import ONE
from benchmarks.data_peers import DDP_ENTRY

if __name__ == "__main__":
    bottom = floors.TENSOR if "--no-errors" in sys.argv else []  # it has no gradients to compare
    report.main("tensor_parallel", __doc__ or "", [ONE, DDP_ENTRY, *bottom, *tensor_peers.PEERS, *ours.TENSOR], [])
