"""TRL's quick starts of SFT, DPO, rewards and GRPO in one program, with a small random Qwen 3: nothing is downloaded.

    torchrun --nproc-per-node 2 examples/integrations/trl_quickstarts.py --isograd "dp2 zero1"

Each is TRL's own first example; in the place of names on the Hub stand a folder and rows that are made here.
"""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import isograd as ig

TRAINERS = (SFTTrainer, DPOTrainer, RewardTrainer, GRPOTrainer)
SFTTrainer, DPOTrainer, RewardTrainer, GRPOTrainer = map(ig.integrations.trainer, TRAINERS)

WORDS = [f"w{number}" for number in range(98)]


def words(first, count):
    return " ".join(WORDS[(7 * first + 3 * place) % len(WORDS)] for place in range(count))


def rows(*names):
    """Texts of very different lengths."""

    def text(row, place):
        return words(row + place, 2 + (row * (place + 3)) % 7)

    return Dataset.from_list([{name: text(row, place) for place, name in enumerate(names)} for row in range(64)])


def save_model(folder):
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def many_words(completions, **_):
    """A reward: how many words are not said twice."""
    return [float(len(set(completion.split()))) for completion in completions]


def main():
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        given = {
            "output_dir": folder, "use_cpu": True, "bf16": False, "max_steps": 3, "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        }  # fmt: skip
        trainer = SFTTrainer(model=folder, args=SFTConfig(**given), train_dataset=rows("text"))
        trainer.train()
        trainer = DPOTrainer(model=folder, args=DPOConfig(**given), train_dataset=rows("prompt", "chosen", "rejected"))
        trainer.train()
        trainer = RewardTrainer(model=folder, args=RewardConfig(**given), train_dataset=rows("chosen", "rejected"))
        trainer.train()
        trainer = GRPOTrainer(
            model=folder, reward_funcs=many_words, args=GRPOConfig(max_completion_length=8, **given),
            train_dataset=rows("prompt"),
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
