"""Built-in conversations about sums, pairs of answers about them, and a tokenizer of bytes with a chat template: what
recipes/lora.yaml trains on.

Nothing is downloaded. The tokenizer is a folder as transformers writes it, so it goes with an exported model.
"""

from __future__ import annotations

import json
from pathlib import Path

from isograd.data.files import write_text

START, STOP, END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MOST = 20
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def conversations(file: Path) -> Path:
    """Every sum of two numbers below MOST, some of them with a second question."""
    lines = []
    for a in range(MOST):
        for b in range(MOST):
            chat = [("user", f"What is {a} plus {b}?"), ("assistant", f"{a} plus {b} is {a + b}.")]
            chat += [("user", "And one more?"), ("assistant", f"{a + b + 1}.")] * ((a + b) % 3 == 0)
            chat = [("system", "Answer briefly.")] * (a % 4 == 0) + chat
            lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) + "\n")
    return write_text(file, "".join(lines))


def pairs(file: Path) -> Path:
    """A sum of two numbers with its answer, and with one that is wrong by one to three."""
    lines = []
    for a in range(MOST):
        for b in range(MOST):
            wrong = a + b + (1, -1, 2, 3)[(a + 2 * b) % 4]
            answers = {"chosen": f"{a} plus {b} is {a + b}.", "rejected": f"{a} plus {b} is {wrong}."}
            lines.append(json.dumps({"prompt": f"What is {a} plus {b}?", **answers}) + "\n")
    return write_text(file, "".join(lines))


def tokenizer(folder: Path) -> Path:
    """One token for each byte, and three special ones; ids 0 to 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in (END, START, STOP)])
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": END, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    write_text(folder / "tokenizer.json", made.to_str(pretty=True))
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=1))
    return folder
