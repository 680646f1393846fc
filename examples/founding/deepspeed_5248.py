"""DeepSpeed #5248: Ulysses and ZeRO 1, 2, 3 over an unmodified Llama, in the thread's own loop, beside one device.

    torchrun --nproc-per-node 4 examples/founding/deepspeed_5248.py
    torchrun --nproc-per-node 4 examples/founding/deepspeed_5248.py --there     # the installed deepspeed

dp2 sp2, two micro-batches, rows with different numbers of labels, buckets of 64 numbers. Each gradient is compared by
name with that of plain transformers on one device: the factor that fits best, and the error. `backward(loss / sp)`,
which the thread asks about, must be refused by name.
"""

import argparse
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SP, MICROS, ROWS, LENGTH, VOCAB = 2, 2, 2, 16, 64


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    return LlamaForCausalLM(config)


def batch(group, micro):
    """The rows of a data rank's micro-batch; the first labels of each row are left out, of a different number."""
    generator = torch.Generator().manual_seed(10 * group + micro)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    labels = tokens.masked_fill(torch.arange(LENGTH) < torch.tensor([[3 * group + micro], [7]]), -100)
    return {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}


def one_device(groups):
    """Gradients of the mean over all labels of the step."""
    alone, weight = model(), 0
    for group in range(groups):
        for micro in range(MICROS):
            rows = batch(group, micro)
            count = int((rows["labels"][:, 1:] != -100).sum())
            (alone(**rows).loss * count).backward()
            weight += count
    return {name: p.grad / weight for name, p in alone.named_parameters()}


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROS,
        "sequence_parallel_size": SP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
    }


def here(stage):
    """Isograd's; the first micro-batch is offered divided, as the thread does, and refused."""
    from isograd.errors import IsogradError
    from isograd.integrations import deepspeed

    engine, *_ = deepspeed.initialize(model=model(), config=config(stage))
    group = engine.global_rank // SP
    refused = ""
    try:
        engine.backward(engine(**batch(group, 0)).loss / SP)
    except IsogradError as error:
        refused = str(error).partition("\n")[0]
        engine.engine.discard()
    for micro in range(MICROS):
        loss = engine(**batch(group, micro)).loss
        engine.backward(loss)
        if micro == MICROS - 1:
            found = dict(engine.engine.grads().items())
        engine.step()
    return found, refused


@cache
def registered():
    """Their attention function, and who shares a sequence: once in a program, for all models."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(model(), "sdpa", SP, ROWS, seq_length_is_variable=True)


def there(stage):
    """DeepSpeed's documented loop: its adapter cuts rows, and the program weighs the losses of a sequence."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from deepspeed.utils import safe_get_full_grad
    from torch.distributed.nn.functional import all_reduce

    unmodified = model()
    mpu = registered()
    engine, *_ = deepspeed.initialize(
        model=unmodified, model_parameters=unmodified.parameters(), config=config(stage), mpu=mpu
    )
    rank, members = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group()
    rows = [batch(torch.distributed.get_rank() // SP, micro) for micro in range(MICROS)]
    mine = [row for micro, row in enumerate(rows) if micro % SP == rank]  # a micro-batch of each rank's loader
    found = {}
    for part in UlyssesSPDataLoaderAdapter(mine, rank, members, SP, engine.device):
        labels = part.pop("shift_labels").contiguous()
        logits = engine(**part).logits
        loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=VOCAB)
        count = (labels != -100).sum()  # theirs gathers the losses: torch cannot differentiate that over gloo
        total = all_reduce(loss.nan_to_num() * count, group=members) / all_reduce(count.float(), group=members)
        engine.backward(total)
        if engine.is_gradient_accumulation_boundary():
            found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        engine.step()
    return found, ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--there", action="store_true", help="deepspeed's own engine")
    options = parser.parse_args()
    whose, right = "isograd", True
    if options.there:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now
        deepspeed.init_distributed("gloo")
        whose = f"deepspeed {deepspeed.__version__}"
    for stage in (1, 2, 3):
        found, refused = (there if options.there else here)(stage)
        groups = torch.distributed.get_world_size() // SP
        truth = one_device(groups)
        factors = {n: float((found[n].double() * t).sum() / (t.double() * t).sum()) for n, t in truth.items()}
        worst = max(float((found[n] - t).norm() / t.norm()) for n, t in truth.items())
        right = right and worst < 1e-5 and refused.startswith("IG861")
        if torch.distributed.get_rank() == 0:
            low, high = min(factors.values()), max(factors.values())
            print(f"{whose}, zero{stage}: factors {low:.3f} to {high:.3f}, largest error {worst:.1e}")
            print(f"    backward(loss / {SP}): {refused or 'taken'}" if not options.there else "", flush=True)
    torch.distributed.barrier()
    (deepspeed.comm if options.there else torch.distributed).destroy_process_group()
    return 0 if right or options.there else 1


if __name__ == "__main__":
    raise SystemExit(main())
