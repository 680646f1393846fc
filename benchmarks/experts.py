"""Experts side by side: one process, transformers' own expert parallelism, isograd's. Experts used evenly, and by Zipf.

    python -m benchmarks.experts                        # 2 ranks
    python -m benchmarks.experts --ranks 4 --rounds 3
    python -m benchmarks.experts --only "one process" "* fsdp ep" "dp ep *" --loads zipf

The columns are those of benchmarks.data_parallel. All contestants read one stored Qwen3-MoE. "wire" is of the rank that
sends most; its bound counts the slots that have to cross, there and back in forward and in backward, as the plain
model's routers choose on these batches, and what the gradients owe. zipf: the n-th most chosen expert gets 1/n of what
the first gets, in an order of its own in each layer. There is no balance loss in it: transformers' has another scale.
"""

from __future__ import annotations

import tempfile

from benchmarks import report
from benchmarks.expert_ours import EXPERTS
from benchmarks.expert_peers import ONE, PEERS
from benchmarks.expert_task import ExpertSizes, busiest, store

MIB = 2**20


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--loads", nargs="+", choices=("even", "zipf"), default=["even", "zipf"])
    chosen = parser.parse_args()
    entries = report.chosen_of([ONE, *PEERS, *EXPERTS], chosen.only)
    for load in chosen.loads:
        with tempfile.TemporaryDirectory() as folder:
            turns = (chosen.rounds, chosen.steps)
            sizes = ExpertSizes(batch=chosen.batch, load=load, folder=folder, turns=turns).for_ranks(chosen.ranks)
            store(sizes)
            report.contest(f"experts_{load}", entries, sizes, chosen, notes(sizes, chosen.ranks), reference=ONE)


def notes(sizes: ExpertSizes, ranks: int) -> list[str]:
    states = [16 * (sizes.dense() + sizes.routed() / ep) / MIB for ep in (1, ranks)]
    return [
        f"{sizes.layers} layers of {sizes.experts} experts of {sizes.width} features, {sizes.per_token} per token: "
        f"{sizes.routed() / 1e6:.1f} M of the parameters",
        f"the busiest of {ranks} ranks computes {busiest(sizes, ranks):.2f} times an even share of the slots",
        f"weights, gradients and moments: {states[0]:.0f} MiB in one process, {states[1]:.0f} MiB with experts / ep",
    ]


if __name__ == "__main__":
    main()
