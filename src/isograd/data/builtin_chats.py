"""Built-in conversations, pairs of answers, and a tokenizer of bytes with a chat template, as recipes/lora.yaml uses
them. Nothing is downloaded.

The docstrings are those of Python's own modules, which are parsed, not imported. A file of them that is there is kept,
so a run that resumes under another Python has the samples that it began with.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator
from hashlib import blake2b
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
WORDS, LONGEST = 5, 110  # of an answer of docstrings: how few words, how many characters


def conversations(file: Path, about: str) -> Path:
    """about "sums": every sum of two numbers below MOST, some of them with a second question. "docstrings": a question
    for each docstring, with its first sentence as the answer."""
    if about == "docstrings":
        return _write_if_missing(file, ({"messages": _turns(question, answer)} for question, answer in sentences()))
    lines = []
    for a in range(MOST):
        for b in range(MOST):
            turns = _turns(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.")
            turns += _turns("And one more?", f"{a + b + 1}.") * ((a + b) % 3 == 0)
            lines.append({"messages": [{"role": "system", "content": "Answer briefly."}] * (a % 4 == 0) + turns})
    return _write(file, lines)


def pairs(file: Path, about: str) -> Path:
    """about "sums": a sum with its answer, and with one that is wrong by one to three. "docstrings": every fourth of
    the questions, its answer, and the answer's words in another order."""
    if about == "docstrings":
        fourth = ((q, answer, disordered(answer)) for q, answer in list(sentences())[::4])
        return _write_if_missing(file, (_pair(*one) for one in fourth if one[1] != one[2]))
    lines = []
    for a in range(MOST):
        for b in range(MOST):
            wrong = a + b + (1, -1, 2, 3)[(a + 2 * b) % 4]
            lines.append(_pair(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", f"{a} plus {b} is {wrong}."))
    return _write(file, lines)


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _write_if_missing(file: Path, lines: Iterable[object]) -> Path:
    return file if file.exists() else _write(file, lines)


def _write(file: Path, lines: Iterable[object]) -> Path:
    return write_text(file, "".join(json.dumps(line) + "\n" for line in lines))


def sentences() -> Iterator[tuple[str, str]]:
    """(question, first sentence of a docstring) of public functions and classes, each sentence once."""
    met = set()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if file.stem.startswith("_"):
            continue
        for name, text in _described(ast.parse(file.read_bytes()), file.stem):
            first = " ".join(text.strip().split("\n\n")[0].split()).split(". ")[0].rstrip(".") + "."
            if len(first.split()) >= WORDS and len(first) <= LONGEST and first.isascii() and first not in met:
                met.add(first)
                yield f"What does {name} do?", first


def _described(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    for part in node.body:
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and not part.name.startswith("_"):
            if text := ast.get_docstring(part):
                yield f"{name}.{part.name}", text
            if isinstance(part, ast.ClassDef):
                yield from _described(part, f"{name}.{part.name}")


def disordered(text: str) -> str:
    """The words of a sentence in the order of their hashes."""
    words = text.split()
    return " ".join(sorted(words, key=lambda word: blake2b(f"{text} {word}".encode(), digest_size=8).digest()))


def tokenizer(folder: Path) -> Path:
    """One token for each byte, and three special ones; ids 0 to 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in (END, START, STOP)])
    return save_tokenizer(folder, made.to_str(pretty=True), STOP)


def save_tokenizer(folder: Path, tokenizer_json: str, end: str) -> Path:
    """A folder with a tokenizer of the special tokens above, as transformers reads it, with the template above."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": END, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    write_text(folder / "tokenizer.json", tokenizer_json)
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=1))
    return folder
