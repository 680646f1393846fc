"""Train a Hugging Face Llama, unmodified, on sequences cut over 2 local ranks, then prove the layout.

    python examples/long_context_hf.py                   # cp2 ring
    python examples/long_context_hf.py "cp4 ulysses2"

`attach` and `shard` are all that cp asks of a program. The proof compares every gradient, by name, with transformers'
own on one device: in fp32, judged by measured noise, because its Llama normalises in fp32 whatever its precision.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import isograd as ig

LENGTH, STEPS = 127, 60


def make(mesh: ig.Mesh) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return ig.hf.attach(LlamaForCausalLM(config), mesh)


def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
    """Each row counts on modulo 64 by a stride of its own; later rows have fewer labels."""
    start, stride = torch.randint(64, (2, rows, 1), generator=torch.Generator().manual_seed(step))
    place = torch.arange(LENGTH)
    tokens = (start + (1 + stride % 3) * place) % 64
    return {"input_ids": tokens, "labels": tokens.masked_fill(place < 16 * torch.arange(rows)[:, None], -100)}


def train(layout: str) -> None:
    mesh = ig.Mesh(layout)
    model = make(mesh)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=3e-3), clip=1.0)
    for step in range(STEPS):
        part = ig.hf.shard(batch(step * mesh.size("dp") + mesh.index("dp"), 4), mesh)
        engine.backward(model(**part.inputs).loss, weight=part.weight)
        stats = engine.step()
        if mesh.rank == 0 and step % 15 == 14:
            print(f"step {step + 1}/{STEPS}  loss {stats.loss:.3f}  labels {stats.weight:.0f}", flush=True)


def case(mesh: ig.Mesh) -> ig.prove.Case:
    def loss(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        part = ig.hf.shard(rows, mesh)
        return model(**part.inputs).loss, part.weight

    return ig.prove.Case(make(mesh), batch(0, 6), loss)


if __name__ == "__main__":
    layout = (sys.argv[1:] or ["cp2 ring"])[0]
    ig.launch(train, ig.Layout.parse(layout).world_size, layout)
    report = ig.verify(case, [layout], dtype=torch.float32)
    print(report)
    raise SystemExit(report.exit_code)
