"""Long sequences side by side: one process, DeepSpeed's Ulysses, isograd's Ulysses and its ring attention.

    python -m benchmarks.sequence                        # 2 ranks, 1024, 2048 and 4096 tokens, minutes on two cores
    python -m benchmarks.sequence --lengths 1024 --rounds 5 --steps 2

One sequence per step, cut over all ranks; each length is a race of its own. The columns are those of
benchmarks.data_parallel. The wire's lower bound is the gradient's, and what attention must move: for Ulysses q, k, v
and the output, for the ring the keys and values that others see and the gradients they send home, of the rank that
sends most. With uneven labels the first three eighths of the sequence have none. Memory: benchmarks.sequence_memory.
With --no-errors the floor of Ulysses races, too (benchmarks.floors).
"""

from __future__ import annotations

import dataclasses

from benchmarks import floors, ours, report, sequence_peers
from benchmarks.contestant import ONE
from benchmarks.task import Sizes

NOTES = [] if sequence_peers.HERE else ["DeepSpeed's Ulysses left out: the package is not installed"]


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096], help="tokens in the sequence")
    parser.set_defaults(batch=1, rounds=3, steps=1)
    chosen = parser.parse_args()
    bottom = floors.ULYSSES if chosen.no_errors else []  # it has no gradients to compare
    entries = report.chosen_of([ONE, *bottom, *sequence_peers.HERE, *ours.SEQUENCE], chosen.only)
    for length in chosen.lengths:
        if length % (2 * chosen.ranks):
            raise SystemExit(f"--lengths {length}: twice the {chosen.ranks} ranks must divide it, for equal work")
        sizes = dataclasses.replace(Sizes(), batch=chosen.batch, seq=length).for_ranks(chosen.ranks)
        report.contest(f"sequence_{length}", entries, sizes, chosen, NOTES)


if __name__ == "__main__":
    main()
