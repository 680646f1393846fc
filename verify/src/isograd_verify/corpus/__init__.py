"""The corpus: one small program per bug, in plain torch.distributed, right or wrong by one argument.

Each `program` of a module, or a module, says in its docstring what is wrong (docs/bugs.md: where it happened) and has

    WORLD, LAYOUT     how many ranks, and what the layout's axes are called
    AXIS, TENSORS     what the diagnosis must name: the axis (or "ranks", "micro-batches"), and a pattern of tensors
    train(bug, seed)  the program; on one rank it is the one-device reference
    BUGS              in few, for AXIS and TENSORS: those of each of several bugs, which `bug` names
    ALONE             in few: the gradients are right for what the ranks were given; the program is judged by itself
    NEEDS             in few: the package of which it is a user's program
"""

from __future__ import annotations

SEVERAL = ("data_parallel", "around_the_step", "contrastive", "cut_models", "experts", "hugging")  # modules
PROGRAMS = (
    "mean-of-means", "norm-unreduced", "accum-overwritten", "wrong-group",
    "nosync-missing", "qknorm-unreduced", "kv-replica-unreduced", "accum-rereduced", "accum-undivided", "bias-n-times",
    "gather-backward-sum", "cut-graph", "clip-per-rank", "norm-counts-replicas", "overflow-alone", "bf16-reduction",
    "bf16-accumulation", "shared-module", "norm-dropout-rng", "resume-other-rank", "ulysses-scale", "ulysses-permute",
    "pp-scale", "tie-after-scatter", "same-data", "border-labels-lost", "temperature-scale", "cache-rng",
    "loss-labels-shifted", "dead-model", "adapter-unreduced", "copies-begin-apart", "rates-differ", "averages-differ",
    "score-partial", "expert-none",
)  # fmt: skip

# Programs with several bugs each, as a user of the framework would write them.
FRAMEWORKS = (
    "ddp", "fsdp2", "dtensor-tp", "pipeline", "experts", "experts-sequence", "balance", "hugging-experts",
    "hugging-sequence", "hugging-idle", "hugging-balance",
)  # fmt: skip
