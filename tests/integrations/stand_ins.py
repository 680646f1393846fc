"""Small random models and rows of the same columns, in folders named as those that TRL's tests download.

A library that finds a folder of such a name where it runs looks for nothing on the Hub (public.py --toys).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OWNER = "trl-internal-testing"
FAMILIES = {"Qwen2ForCausalLM-2.5": "Qwen2", "Qwen3ForCausalLM": "Qwen3", "LlamaForCausalLM-3.2": "Llama"}
FAMILIES |= {"MistralForCausalLM-0.2": "Mistral", "Qwen3MoeForCausalLM": "Qwen3Moe"}
REWARDS = {"Qwen2ForSequenceClassification-2.5": "Qwen2", "Qwen3ForSequenceClassification": "Qwen3"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAYINGS = ["rain fell", "a crow wrote its name in the snow", "tea", "the tide went out and forgot to come back again"]


def tokenizer() -> Any:
    """Bytes, and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({word: number for number, word in enumerate([*SPECIAL, *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=TEMPLATE,
        additional_special_tokens=SPECIAL[1:2],
    )  # fmt: skip


def model(family: str, task: str = "CausalLM") -> Any:
    """Two small layers."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 512, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "output_router_logits": True}
    config = getattr(transformers, f"{family}Config")(
        **shape, **(experts if family.endswith("Moe") else {}), eos_token_id=2, pad_token_id=0, bos_token_id=None,
        **({} if task == "CausalLM" else {"num_labels": 1}),
    )  # fmt: skip
    return getattr(transformers, f"{family}For{task}")(config)


def rows() -> dict[str, list[dict[str, Any]]]:
    """By the names of TRL's configurations."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(17):
        ask, good, bad = (SAYINGS[(number + shift) % 4] + f" {number}" for shift in range(3))
        user, better, worse = (
            [{"role": role, "content": said}] for role, said in (("user", ask), ("assistant", good), ("assistant", bad))
        )
        for kind, (p, c, r) in {
            "standard": (ask, " " + good, " " + bad),
            "conversational": (user, better, worse),
        }.items():
            text = {"text": p + c} if kind == "standard" else {"messages": p + c}
            for name, row in {
                "language_modeling": text, "prompt_only": {"prompt": p},
                "prompt_completion": {"prompt": p, "completion": c},
                "preference": {"prompt": p, "chosen": c, "rejected": r},
                "implicit_prompt_preference": {"chosen": p + c, "rejected": p + r},
                "unpaired_preference": {"prompt": p, "completion": c, "label": bool(number % 2)},
            }.items():  # fmt: skip
                found.setdefault(f"{kind}_{name}", []).append(row)
    return found


def write(folder: Path) -> None:
    """All of them."""
    made = [(name, family, "CausalLM") for name, family in FAMILIES.items()]
    made += [(name, family, "SequenceClassification") for name, family in REWARDS.items()]
    for name, family, task in made:
        model(family, task).save_pretrained(folder / OWNER / f"tiny-{name}")
        tokenizer().save_pretrained(folder / OWNER / f"tiny-{name}")
    zen, said = folder / OWNER / "zen", ["---", "configs:"]
    for name, lines in rows().items():
        said += [f"- config_name: {name}", "  data_files:"]
        for split, part in (("train", lines), ("test", lines[:2])):
            place = zen / name / f"{split}.jsonl"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("".join(json.dumps(row) + "\n" for row in part))
            said += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (zen / "README.md").write_text("\n".join([*said, "---", ""]))
