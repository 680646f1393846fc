"""TRL's trainers on a tiny random Llama, with data that are tokens already: SFT, DPO, reward, GRPO."""

import sys
import tempfile

import tiny
import torch
import torch.nn.functional as F
import transformers_trainer as family
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast, set_seed

SWITCHES = ("dpo", "reward", "grpo", "sft")
DPO, GRPO = "--dpo", "--grpo"


def INPUTS():
    """GRPO makes completions and advantages before it calls the model, which is given neither."""
    if GRPO not in sys.argv:
        return None
    import trl

    return trl.GRPOTrainer, "_compute_loss"


def tokenizer():
    words = {f"w{i}": i for i in range(tiny.VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w1", eos_token="w2", bos_token="w3")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


def plain(args):
    args.moe = args.lora = False
    made = family.plain(args)
    if args.reward:
        made.config.num_labels, made.config.pad_token_id = 1, 1
        set_seed(0)
        return LlamaForSequenceClassification(made.config)
    return made


def sentences(rows, shortest, longest, generator):
    def one():
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(4, tiny.VOCAB, (length,), generator=generator))

    return [one() for _ in range(rows)]


def data(args):
    g, long = torch.Generator().manual_seed(0), 10
    short = 2 if args.uneven else long
    if args.sft:
        return Dataset.from_dict({"prompt": sentences(64, 4, 4, g), "completion": sentences(64, short, long, g)})
    if args.grpo:
        return Dataset.from_dict({"prompt": sentences(64, 4, 4, g)})
    pairs = {"chosen": sentences(64, short, long, g), "rejected": sentences(64, short, long, g)}
    return Dataset.from_dict({"prompt": sentences(64, 4, 4, g)} | pairs)


def log_probabilities(model, ids, labels):
    """Of each row's labels, summed."""
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    logits = model(input_ids=ids).logits.transpose(1, 2)
    return -F.cross_entropy(logits, shifted, reduction="none").sum(1)


def truth(model, batch):
    """SFT: a mean over the labels of completions. DPO and reward: a mean over pairs, the chosen rows first. In the
    first step the DPO policy is its reference, where the gradient of -log sigmoid(0.1 x) is -0.05 times that of x.
    GRPO (its default, DAPO's loss): a mean over the tokens of all completions of advantage x log probability, which in
    the first step, where the policy is the one that sampled, has the gradient of the clipped ratio."""
    if GRPO in sys.argv:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        length = batch["completion_ids"].size(1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
        counted = batch["completion_mask"].float()
        return -(batch["advantages"][:, None] * chosen * counted).sum(), int(counted.sum())
    if "labels" not in batch:
        chosen, rejected = model(**batch).logits.squeeze(-1).chunk(2)
        return -F.logsigmoid(chosen - rejected).sum(), len(chosen)
    if DPO in sys.argv:
        chosen, rejected = log_probabilities(model, batch["input_ids"], batch["labels"]).chunk(2)
        return -0.05 * (chosen - rejected).sum(), len(chosen)
    return family.truth(model, batch)


def main():
    args = tiny.options(*SWITCHES)
    import trl

    with tempfile.TemporaryDirectory() as place:
        common = {
            "output_dir": place, "use_cpu": True, "bf16": False, "max_steps": args.steps, "logging_steps": 1,
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": args.accumulate, "save_strategy": "no",
            "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
        }  # fmt: skip
        how = {"train_dataset": data(args), "processing_class": tokenizer()}
        if args.sft:
            trainer = trl.SFTTrainer(plain(args), args=trl.SFTConfig(**common, max_length=32), **how)
        elif args.dpo:
            trainer = trl.DPOTrainer(plain(args), plain(args), args=trl.DPOConfig(**common, max_length=32), **how)
        elif args.reward:
            trainer = trl.RewardTrainer(plain(args), args=trl.RewardConfig(**common, max_length=32), **how)
        else:
            config = trl.GRPOConfig(**common, num_generations=2, max_completion_length=8)

            def reward(completions, **_):
                return [float(len(set(c.split()))) for c in completions]

            trainer = trl.GRPOTrainer(plain(args), reward_funcs=reward, args=config, **how)
        trainer.train()


if __name__ == "__main__":
    main()
