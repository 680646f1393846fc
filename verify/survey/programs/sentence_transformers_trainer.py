"""sentence-transformers' trainer on a tiny random BERT: pairs with MultipleNegativesRankingLoss, and scored pairs."""

import tempfile

import tiny
import torch
import torch.nn.functional as F
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, set_seed
from trl_trainers import sentences, tokenizer

SWITCHES = ("gather",)
RENAME = [("model.0.auto_model.", ""), ("model.0.model.", "")]


def plain(args):
    set_seed(0)
    return BertModel(bert())


def embedded(model, call, column):
    """Mean pooling, normalized; column 0: anchors, 1: positives."""
    given = {name: call[f"{column}.{name}"] for name in ("input_ids", "attention_mask")}
    states, mask = model(**given).last_hidden_state, given["attention_mask"][..., None].float()
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def ranked(anchors, candidates):
    """Sum over anchors; the positive of anchor i is candidate i."""
    return F.cross_entropy(20 * anchors @ candidates.T, torch.arange(len(anchors)), reduction="sum")


def truth(model, call):
    anchors, positives = (embedded(model, call, i) for i in range(2))
    return ranked(anchors, positives), len(anchors)


def whole(model, batches, args):
    """With gathered candidates: one loss over the rows of all ranks."""
    if not args.gather:
        return None
    anchors, positives = (torch.cat([embedded(model, b, i) for b in batches]) for i in range(2))
    return ranked(anchors, positives) / len(anchors)


def bert():
    return BertConfig(
        vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def encoder(place):
    set_seed(0)
    BertModel(bert()).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return SentenceTransformer(modules=[Transformer(place), Pooling(16)], device="cpu")


def data(args):
    g = torch.Generator().manual_seed(0)
    return Dataset.from_dict({"anchor": sentences(64, 4, 8, g), "positive": sentences(64, 4, 8, g)})


def main():
    args = tiny.options(*SWITCHES)
    with tempfile.TemporaryDirectory() as place:
        model = encoder(place)
        loss = losses.MultipleNegativesRankingLoss(model, gather_across_devices=args.gather)
        how = SentenceTransformerTrainingArguments(
            output_dir=place, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=4,
            gradient_accumulation_steps=args.accumulate, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        SentenceTransformerTrainer(model=model, args=how, train_dataset=data(args), loss=loss).train()


if __name__ == "__main__":
    main()
