"""transformers' Trainer on tiny random models of other tasks than causal language modelling."""

import tempfile

import tiny
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

SWITCHES = ("classify", "regress", "tokens", "masked", "t5", "llama-classify")
CLASSES = 5


def plain(args):
    set_seed(0)
    bert = BertConfig(
        vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=1 if args.regress else CLASSES,
    )  # fmt: skip
    llama = LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, num_labels=CLASSES, pad_token_id=0,
    )  # fmt: skip
    if args.classify or args.regress:
        return BertForSequenceClassification(bert)
    if args.tokens:
        return BertForTokenClassification(bert)
    if args.masked:
        return BertForMaskedLM(bert)
    if args.t5:
        t5 = T5Config(
            vocab_size=tiny.VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(t5)
    return LlamaForSequenceClassification(llama)


class Data(torch.utils.data.Dataset):
    def __init__(self, args):
        self.text = tiny.Text(args.uneven)
        one = torch.Generator().manual_seed(7)
        self.rows = torch.randint(CLASSES, (64,), generator=one)
        if args.regress:
            self.rows = torch.rand(64, generator=one)
        self.whole = args.classify or args.regress or args.llama_classify
        self.small = args.tokens

    def __len__(self):
        return 64

    def __getitem__(self, row):
        found = self.text[row]
        labels = found["labels"]
        if self.small:
            labels = torch.where(labels == -100, labels, labels % CLASSES)
        return {"input_ids": found["input_ids"].clamp(min=1), "labels": self.rows[row] if self.whole else labels}


def truth(model, batch):
    """Sums of the losses of rows or labels, and how many."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], **({"labels": labels} if hasattr(model, "decoder") else {})).logits
    if labels.is_floating_point():
        return F.mse_loss(logits.squeeze(-1), labels, reduction="sum"), len(labels)
    logits, labels = logits.reshape(-1, logits.size(-1)), labels.flatten()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, int((labels != -100).sum())


def main():
    args = tiny.options(*SWITCHES)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=2, max_grad_norm=0.0,
            gradient_accumulation_steps=args.accumulate, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        Trainer(plain(args), arguments, train_dataset=Data(args)).train()


if __name__ == "__main__":
    main()
