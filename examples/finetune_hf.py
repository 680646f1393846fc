"""Fine-tune a transformers model at ZeRO 3 on local ranks: any nn.Module, your own loop, no download.

    python examples/finetune_hf.py                 # 2 ranks
    python examples/finetune_hf.py "dp4 zero3"

The model learns to count on, modulo 32. Ranks have rows of different lengths; the gradient is that of one device all
the same, because each loss comes with its number of labels. Blocks are found in the model; parameters live as row
shards and are whole for one block at a time.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import isograd as ig

STEPS, ROWS, LENGTH = 60, 8, 24


def batch(step: int, rank: int) -> tuple[dict[str, torch.Tensor], int]:
    """Rows that count on from somewhere, with labels on a part of each; and how many labels count."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    tokens = (torch.randint(32, (ROWS, 1), generator=random) + torch.arange(LENGTH)) % 32
    used = torch.randint(2, LENGTH, (ROWS, 1), generator=random)
    labels = tokens.masked_fill(torch.arange(LENGTH) >= used, -100)
    return {"input_ids": tokens, "labels": labels}, int((labels[:, 1:] != -100).sum())


def finetune(layout: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    mesh = ig.Mesh(layout)
    engine = ig.Engine(model, mesh, lambda shards: torch.optim.AdamW(shards, lr=3e-3), clip=1.0)
    for step in range(STEPS):
        inputs, labels = batch(step, mesh.index("dp"))
        engine.backward(model(**inputs).loss, weight=labels)
        stats = engine.step()
        if mesh.rank == 0 and step % 15 == 14:
            print(f"step {step + 1}/{STEPS}  loss {stats.loss:.3f}  labels {stats.weight:.0f}", flush=True)
    written = model.eval().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    with engine.full_parameters():
        norm = float(model.lm_head.weight.detach().norm())  # outside of here, and of forwards, parameters read as NaN
    if mesh.rank == 0:
        print(f"after 5 6 7: {written[0, 3:].tolist()}  norm of the head: {norm:.3f}")


if __name__ == "__main__":
    layout = (sys.argv[1:] or ["dp2 zero3"])[0]
    ig.launch(finetune, ig.Layout.parse(layout).world_size, layout)
