"""transformers' Trainer: the balance loss of experts counts once per rank and per micro-batch, the labels once in all.

    torchrun --nproc-per-node 1 transformers_moe_aux.py
    torchrun --nproc-per-node 1 transformers_moe_aux.py 2

All rows of the data are equal, so the gradient is the same for any number of ranks and of micro-batches. The norm of
the head's gradient is (only labels move it). That of the router's is not, which the balance loss moves, too. The loss
of a micro-batch is its sum over labels divided by the labels of all, plus router_aux_loss_coef times a mean of its own;
Trainer multiplies it by the number of ranks, and adds micro-batches up.
"""

import sys
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Show(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        head, router = (next(g for n, g in named.items() if word in n) for word in ("lm_head", "gate.weight"))
        if args.process_index == 0:
            print(f"{args.world_size} ranks, {args.gradient_accumulation_steps} micro-batches:", end=" ")
            print(f"head {head.norm():.6f}, router {router.norm():.6f}")


set_seed(0)
config = MixtralConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, output_router_logits=True,
    router_aux_loss_coef=1.0,
)  # fmt: skip
row = torch.randint(64, (12,))
with tempfile.TemporaryDirectory() as place:
    arguments = TrainingArguments(
        output_dir=place, use_cpu=True, max_steps=1, per_device_train_batch_size=1, max_grad_norm=0.0,
        gradient_accumulation_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 1, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row}] * 8
    Trainer(MixtralForCausalLM(config), arguments, train_dataset=data, callbacks=[Show()]).train()
