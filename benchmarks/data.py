"""Building and loading token data beside the `datasets` library, in one run: the same texts, tokenizer and windows.

    python -m benchmarks.data [--megabytes 16] [--rounds 5]      needs datasets; about two minutes

A JSON-lines file becomes tokens on the disk: `isograd data build`, and `load_dataset`, `map` with a fast tokenizer in
batches, `map` that groups into windows, `save_to_disk`, as transformers' run_clm.py does it. Each is a fresh process,
its imports counted, one worker and one thread. Then batches of shuffled windows are read, by `Mixture` and by a
`DataLoader` over the dataset. Rounds alternate; medians. "CPU" is the process's own time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

LENGTH, BATCH, BATCHES = 512, 8, 400
CLOCKS = """
import sys, time
texts, folder, out = sys.argv[1:]
def clocks(): return time.perf_counter(), time.process_time()
def told(tokens, began): print(tokens, *(now - then for now, then in zip(clocks(), began)))
def load(reader):
    import torch
    torch.set_num_threads(1)
    next(reader)
    began = clocks()
    told(sum(next(reader).numel() for _ in range({batches})), began)
"""
PROGRAMS = {
    ("isograd", "build"): """
began = clocks()
from isograd.data import build
manifest = build(out, [texts], tokenizer=folder, validation=0.0)
told(sum(shard.tokens for shard in manifest.shards), began)
""",
    ("datasets", "build"): """
began = clocks()
from datasets import load_dataset
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(folder)
end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
def tokenized(rows):
    return {{"input_ids": [ids + [end] for ids in tokenizer(rows["text"])["input_ids"]]}}
def grouped(rows):
    ids = sum(rows["input_ids"], [])
    return {{"input_ids": [ids[i : i + {length}] for i in range(0, len(ids) - {length} + 1, {length})]}}
found = load_dataset("json", data_files=texts, split="train", cache_dir=out + "-cache")
found = found.map(tokenized, batched=True, remove_columns=["text"])
tokens = sum(len(ids) for ids in found["input_ids"])
found.map(grouped, batched=True, remove_columns=found.column_names).save_to_disk(out)
told(tokens, began)
""",
    ("isograd", "load"): """
from isograd.data import Mixture, Source
mixture = Mixture([Source(out)], length={length}, batch={batch}, packing="stream")
load(mixture.rows(step, range({batch}))["tokens"] for step in range(10**9))
""",
    ("datasets", "load"): """
from itertools import repeat
from datasets import load_from_disk
from torch.utils.data import DataLoader
rows = DataLoader(load_from_disk(out).with_format("torch"), batch_size={batch}, shuffle=True)
load(batch["input_ids"] for rows in repeat(rows) for batch in rows)
""",
}


def written(home: Path, megabytes: int) -> None:
    """Documents of invented words, and a tokenizer that was trained on some of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "or")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    documents, size = list[str](), 0
    while size < megabytes << 20:
        documents.append(" ".join(draw.choices(words, weights, k=draw.randint(20, 400))))
        size += len(documents[-1])
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(documents[:2000], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(home / "tokenizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=16, help="of text (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    options = parser.parse_args()
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    rates = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    counts = defaultdict[str, set[int]](set)
    with tempfile.TemporaryDirectory() as home:
        written(Path(home), options.megabytes)
        for number in range(options.rounds + 1):  # the first fills the system's cache
            for (library, what), program in sorted(
                PROGRAMS.items(), reverse=bool(number % 2), key=lambda one: one[0][0]
            ):
                text = (CLOCKS + program).format(length=LENGTH, batch=BATCH, batches=BATCHES)
                files = [f"{home}/texts.jsonl", f"{home}/tokenizer", f"{home}/{library}-{number}"]
                said = subprocess.check_output([sys.executable, "-c", text, *files], env=environment, text=True)
                tokens, clock, cpu = map(float, said.split()[-3:])
                if what == "build":
                    counts[library].add(int(tokens))
                if number:
                    rates[library, what].append((tokens / clock, tokens / cpu))
    table = Table(title=f"{options.megabytes} MB of text, tokens/s, one thread")
    for heading in ("", "build", "build, CPU", "load", "load, CPU"):
        table.add_column(heading, justify="left" if not heading else "right")
    for library in ("datasets", "isograd"):
        cells = []
        for what in ("build", "load"):
            for clock in (0, 1):
                own, theirs = (statistics.median(r[clock] for r in rates[one, what]) for one in (library, "datasets"))
                cells.append(f"{own:,.0f} ({own / theirs:.2f})")
        table.add_row(library, *cells)
    Console().print(table)
    print(f"tokens that were built: {dict(counts)}")


if __name__ == "__main__":
    main()
