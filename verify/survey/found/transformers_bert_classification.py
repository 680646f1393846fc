"""transformers' Trainer: BERT's classifier trains with a gradient that grows with ranks and with accumulation.

    torchrun --nproc-per-node 1 transformers_bert_classification.py
    torchrun --nproc-per-node 1 transformers_bert_classification.py 2
    torchrun --nproc-per-node 2 transformers_bert_classification.py 2

All rows of the data are equal, so the gradient is the same for any number of ranks and of micro-batches. It is 1, 2 and
4 times as large. Trainer takes a model whose forward has **kwargs for one that divides its loss by num_items_in_batch:
it multiplies the loss by the number of ranks, and does not divide it by the micro-batches.
BertForSequenceClassification accepts the keyword and takes a mean.
"""

import sys
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Show(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        norm = next(p.grad for name, p in model.named_parameters() if name.endswith("classifier.weight")).norm()
        if args.process_index == 0:
            micro = args.gradient_accumulation_steps
            print(f"{args.world_size} ranks, {micro} micro-batches: gradient of the classifier {norm:.6f}", flush=True)


set_seed(0)
config = BertConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
data = [{"input_ids": torch.randint(64, (12,)), "labels": 1}] * 8
with tempfile.TemporaryDirectory() as place:
    arguments = TrainingArguments(
        output_dir=place, use_cpu=True, max_steps=1, per_device_train_batch_size=1, max_grad_norm=0.0,
        gradient_accumulation_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 1, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(BertForSequenceClassification(config), arguments, train_dataset=data, callbacks=[Show()]).train()
