"""The bugs by their ids (docs/bugs.md): what usually causes each and where to look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """What usually causes a bug, and where to look for it."""

    cause: str
    look: str


BUGS: dict[str, Bug] = {
    "ulysses-scale": Bug(
        "a gradient divided, or not divided, by the size of a group: most often of the sequence-parallel one",
        "every place that divides a loss or a gradient by a world or group size; there should be one, by tokens",
    ),
    "ulysses-permute": Bug(
        "a reshape after an all-to-all that should have been a transpose first",
        "the lines between the all-to-all and the next matrix product; send index-coded values through them",
    ),
    "nosync-missing": Bug(
        "backwards that ran without synchronisation and were never reduced afterwards",
        "the scope of no_sync: its forward counts too, and the last micro-batch must be outside",
    ),
    "outside-wrapper": Bug(
        "a module that the wrapper does not know: it stands in a list or beside the wrapped model, or was added or "
        "unfrozen after the wrapper took down which parameters there are",
        "where the module is made and where DistributedDataParallel or fully_shard is put around it: a ModuleList in "
        "place of a list, requires_grad before wrapping, a wrapper of its own",
    ),
    "reduced-twice": Bug(
        "a gradient that a wrapper has averaged over the ranks already is summed over them again",
        "every all-reduce of .grad after backward: DistributedDataParallel has done it",
    ),
    "parameters-mixed": Bug(
        "ranks have gradients of different parameters, and reduce those that each has as one buffer (FSDP2, by hand)",
        "heads and experts that some ranks do not use: let each take part in every loss, with 0 times its output, or "
        "fill `.grad` with zeros",
    ),
    "inputs-differ": Bug(
        "ranks that hold parts of one model were given different data: a sampler that counts every rank as a data rank",
        "num_replicas and rank of the sampler, and seeds of data: data-parallel ranks only, the same within a "
        "tensor-parallel group",
    ),
    "wrong-adjoint": Bug(
        "what a custom function returns in backward is not the adjoint of what it does in forward",
        "its backward: a gather's adjoint sums what all ranks send back and takes this rank's part, a sum's adjoint "
        "sums; make gradients contiguous before a collective reads their memory",
    ),
    "input-unreduced": Bug(
        "a layer that is cut over ranks takes an input that all of them hold, and nobody sums the input's gradient",
        "every use of such an input, a side branch's too: Megatron's copy_to_tensor_model_parallel_region, whose "
        "backward is an all-reduce; or a loss that is not the same on all of these ranks",
    ),
    "norm-unreduced": Bug(
        "norm gradients under sequence parallelism are sums over this rank's tokens only",
        "the all-reduce over the tensor-parallel group of every parameter that works on a sequence shard",
    ),
    "router-unreduced": Bug(
        "the router works on a sequence shard and its gradient is never summed over the tensor-parallel group",
        "the list of parameters that are all-reduced over that group after backward",
    ),
    "expert-scale": Bug(
        "routed experts are averaged over the ranks that hold copies of them, everything else over all data ranks: the "
        "tokens of an ep group have come together in an expert already",
        "the divisor of experts' gradients: the sum goes over edp, the divisor is that of all other parameters",
    ),
    "expert-twice": Bug(
        "routed experts are divided by the size of their ep group, and once more by a divisor that contains it",
        "hooks and scale factors for experts' gradients: one division by all data ranks is enough",
    ),
    "ep-copies-drift": Bug(
        "copies of routed experts on several ranks are never summed",
        "the group over which experts' gradients are summed: all ranks that hold the same experts (edp)",
    ),
    "norm-omits-experts": Bug(
        "the gradient norm has no squares of routed experts, or those of this rank's only",
        "the sum of squares: experts' are summed over ep, and counted once per edp group",
    ),
    "expert-none": Bug(
        "an expert that got no token has no gradient instead of zeros: its momentum and its weight decay are left out",
        "loops that pass by experts without tokens; add 0 times their parameters, or compute them with no rows",
    ),
    "score-partial": Bug(
        "each rank multiplies the outputs of its own experts by the tokens' weights, and the gradients of these "
        "weights are never summed over the ranks of the experts",
        "the scores where they meet expert outputs: their backward must sum over the ep group, before the router's",
    ),
    "shared-gate": Bug(
        "the gate of a shared expert works on a sequence shard and its gradient is never summed",
        "the list of parameters that are all-reduced over the tensor-parallel group after backward",
    ),
    "gather-cut": Bug(
        "the tokens' weights travel to the experts by a collective without a backward: the router learns nothing from "
        "the loss",
        "every all_gather or all_to_all of scores: it needs an adjoint, as that of the tokens does",
    ),
    "aux-times-world": Bug(
        "a term that each rank has whole (a balance loss, a penalty of weights) is summed over the ranks with the loss "
        "of the labels, of which each rank has a part",
        "what multiplies the whole loss by the number of ranks or divides it by accumulation: it must not touch a term "
        "that is a mean by itself",
    ),
    "aux-times-micro": Bug(
        "the balance loss of each micro-batch is added, and nobody divides by their number",
        "the division of the loss: labels are divided by those of the whole step, the balance loss by nothing",
    ),
    "aux-over-dp": Bug(
        "the balance loss is divided by the tokens of all ranks, each rank has its own sums, and ranks are averaged",
        "the balance loss's denominator and the average over data ranks: one of them is enough",
    ),
    "bias-per-micro": Bug(
        "the bias of the choice of experts is moved after every micro-batch",
        "where the bias is updated: once per optimizer step, by the counts of all micro-batches and ranks",
    ),
    "bias-twice": Bug(
        "tokens per expert are counted inside a checkpointed forward, which backward computes once more",
        "the line that adds to the counts: outside of the checkpointed function, or not during recomputation",
    ),
    "recompute-flip": Bug(
        "the choice of experts is made again when a checkpointed forward is computed once more, and ties or noise fall "
        "otherwise",
        "keep the chosen indices and use them again: choose outside of the checkpointed function, or save it",
    ),
    "qknorm-unreduced": Bug(
        "one q/k norm weight serves the heads of all ranks, and each rank knows only its own heads' part",
        "the list of parameters that are all-reduced over the tensor-parallel group, even without sequence parallelism",
    ),
    "kv-replica-unreduced": Bug(
        "replicated key and value weights serve different query heads on each rank",
        "the group of ranks that hold the same key/value head: gradients must be summed over it",
    ),
    "statistic-unreduced": Bug(
        "a statistic that the loss uses (a teacher's center, a running size, the deviation of rewards) is made from "
        "each rank's own rows",
        "where it is updated: sum its terms and their number over the ranks first",
    ),
    "mean-of-means": Bug(
        "each rank or micro-batch divides by its own number of tokens, and the means are averaged",
        "the loss: sum it, sum the token counts over ranks and micro-batches, divide once",
    ),
    "accum-overwritten": Bug(
        "only the last micro-batch is left in the gradient",
        "zero_grad or an assignment to .grad inside the accumulation loop",
    ),
    "accum-rereduced": Bug(
        "what was already summed over ranks is summed again with every later micro-batch",
        "an all-reduce of .grad inside the accumulation loop",
    ),
    "accum-redivided": Bug(
        "what was already accumulated is divided again by a later backward, schedule step or average over ranks",
        "what divides .grad instead of the loss: scale_grads of a pipeline's schedule that is called several times per "
        "optimizer step, a divide factor applied to partial sums; divide the loss, or .grad once before the step",
    ),
    "divided-twice": Bug(
        "a gradient is divided twice by the size of a group: by the wrapper that averages, and once more elsewhere",
        "every division by that size: the loss, the wrapper's divide factor, a hook; one of them is enough",
    ),
    "log-softmax-uncorrected": Bug(
        "under torch's loss_parallel() log_softmax has no backward of its own: only cross-entropy's gradient is right",
        "uses of log_softmax inside loss_parallel() other than the loss: an entropy, label smoothing, a z-loss; gather "
        "the logits for them, or compute them outside",
    ),
    "accum-clipped": Bug(
        "gradients are clipped after every backward, and not once behind the last one",
        "the clip inside the accumulation loop: it belongs behind the loop, before the step",
    ),
    "accum-undivided": Bug(
        "the mean over micro-batches is missing: gradients are multiplied by their number",
        "the division by the number of accumulation steps, or better by the number of tokens of the whole step",
    ),
    "tie-after-scatter": Bug(
        "the copies of a shared weight are summed after their gradients were scattered to different owners",
        "the order: sum over the ranks that share the weight first, or cut every copy at the same rows",
    ),
    "pp-scale": Bug(
        "pipeline stages divide what the stages behind them have divided already",
        "every division by the number of micro-batches: only the loss, on the last stage, is divided",
    ),
    "micro-batches-swapped": Bug(
        "a pipeline stage takes its micro-batches up in backward in another order than gradients come back",
        "what backward takes from a list of outputs: list.pop() takes the last one, gradients come first in, first out",
    ),
    "bias-n-times": Bug(
        "a bias is added on every tensor-parallel rank before the outputs are summed",
        "the row-parallel linear: add the bias after the all-reduce",
    ),
    "gather-backward-sum": Bug(
        "these count once for each rank of a group: they are not divided as the others are, or the backward of an "
        "all-gather sums copies that are equal on all ranks",
        "a module whose gradients are divided otherwise (a factor set on one, experts left out); else the adjoint "
        "of the gather in front of the first wrong layer: take this rank's slice, do not sum",
    ),
    "cut-graph": Bug(
        "a collective without an autograd rule ran in forward: everything before it gets no gradient through it",
        "use an operation with a backward (torch.distributed.nn, or isograd.comm.ops)",
    ),
    "wrong-group": Bug(
        "a reduction ran over a group that mixes ranks with different shards",
        "the group argument of the reduction: the world instead of one axis?",
    ),
    "clip-per-rank": Bug(
        "each rank clips by a norm of its own",
        "the global norm: sum squares over all shards before the root, the same on every rank",
    ),
    "clip-scaled": Bug(
        "gradients are clipped before a gradient scaler has taken its factor from them",
        "the order: scaler.scale(loss).backward(), scaler.unscale_(optimizer), the clip, scaler.step(optimizer)",
    ),
    "norm-counts-replicas": Bug(
        "replicated parameters enter the global norm once per copy",
        "the sum of squares over the tensor-parallel group: count a replica on one rank only",
    ),
    "overflow-alone": Bug(
        "a rank that saw an overflow skipped its step while others stepped",
        "the found-inf flag: take its maximum over all ranks before deciding",
    ),
    "bf16-reduction": Bug(
        "a gradient was summed in half precision although it is kept in single",
        "the reduce dtype of the wrapper, and compression hooks",
    ),
    "bf16-accumulation": Bug(
        "the rows of one token id are added in half precision, and a sum that has grown large no longer changes",
        "the dtype of the embedding's weight: keep it in fp32 and cast what it returns (CUDA adds these rows in fp32)",
    ),
    "shared-module": Bug(
        "a module that is used twice was reduced or read after its first use in backward",
        "hooks that fire per use instead of after accumulation",
    ),
    "norm-dropout-rng": Bug(
        "ranks that hold copies of an activation drop different elements of it",
        "the random state: equal over the tensor-parallel group wherever activations are replicated",
    ),
    "temperature-scale": Bug(
        "the gradient of a contrastive loss's scale is summed over ranks, or added per chunk, once more than encoders'",
        "the backward of the loss: does it reduce the scale's gradient itself? then nobody may after it",
    ),
    "cache-rng": Bug(
        "the replay of cached representations draws other random numbers than the pass that cached them",
        "the state of the random generators, CPU and device: kept before a chunk's first pass, set before its replay",
    ),
    "loss-labels-shifted": Bug(
        "the columns of gathered candidates stand in another order than the labels of the rows count them",
        "the gather: documents of all ranks first, then each set of negatives, or labels that know the order",
    ),
    "positions-restart": Bug(
        "the sequence is cut over the ranks, and each rank counts its positions from 0",
        "where positions are made for a part of a sequence: its first one is the rank times the part's length",
    ),
    "tie-unreduced": Bug(
        "a weight that two pipeline stages share (an embedding and the head) is not summed over them",
        "behind the last micro-batch: an all-reduce of its gradient over the stages that hold it",
    ),
    "border-labels-lost": Bug(
        "labels are shifted after the sequence was cut: the last token of each part has lost its target",
        "where labels are shifted: it must happen on whole sequences, and the loss must not shift them again",
    ),
    "resume-other-rank": Bug(
        "a rank loaded another rank's shard",
        "how file names are made of ranks and groups when saving and when loading",
    ),
    "order": Bug(
        "members of a group call different collectives, or in a different order",
        "conditions that depend on the rank or its data around a collective",
    ),
    "unowned": Bug(
        "a parameter gets gradients but no optimizer has it",
        "the list given to the optimizer; parameters that were replaced after it was made",
    ),
    "non-finite": Bug("a NaN or Inf reached the optimizer", "the first module whose output is not finite"),
    "replicas-differ": Bug(
        "copies of a parameter are no longer equal",
        "whatever changes one copy only: initialisation, a missing reduction, a skipped step",
    ),
    "same-data": Bug(
        "data ranks read the same samples: a sampler that does not know of ranks, or the same seed on all of them",
        "the sampler of the data loader: DistributedSampler(data), or rows[rank::world]",
    ),
    "adapter-unreduced": Bug(
        "adapters that were put into a model after it was wrapped: the wrapper knows the parameters of that moment",
        "the order: first adapters, then DistributedDataParallel or fully_shard, then the optimizer",
    ),
    "copies-begin-apart": Bug(
        "a module that each rank made from its own random state, outside of what the wrapper broadcasts and reduces",
        "where the module is made: inside the wrapped model, or wrapped and broadcast like it; copy a teacher from "
        "a model that is wrapped",
    ),
    "same-masks": Bug(
        "one seed on all ranks, and random states that are taken from it alone",
        "where the seed is set: add the rank to it for dropout, and only there",
    ),
    "averages-differ": Bug(
        "a decay that counts this rank's own samples, or updates that ranks make at different times",
        "what the average's decay is given, and conditions around its update: both the same on all ranks",
    ),
    "rates-differ": Bug(
        "a schedule that counts this rank's own samples or looks at its own loss, or is stepped on some ranks only",
        "what the schedule is given: it must be the same number on all ranks",
    ),
    "dead-model": Bug(
        "weights that are all zero: made on the meta device and never filled, or a file whose names did not fit",
        "what loading returns (missing and unexpected names); the mean and spread of each weight before the first step",
    ),
}

TWICE = "twice"  # among the meanings of a factor (wording.meanings): the square of a group's size divides
