"""GPT-NeoX #1257: sequence parallelism beside tensor parallelism alone, from a config of NeoX, on 4 local ranks.

    python examples/founding/neox_1257.py                 # writes neox_1257.png beside it, or where --out says

1. Losses over 40 steps under tp4 and tp4 sp, with the time of a step, and what a rank keeps of activations.
2. A checkpoint of tp4 sp, which tp2 and tp2 sp pp2 load: the same loss.
3. The gradients of tp sp, alone, with a pipeline and with data ranks, against one device, by name, in fp64.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import isograd as ig
from isograd.checkpoint import CheckpointManager
from isograd.integrations.megatron_config import convert

NEOX = {
    "num_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "seq_length": 256, "max_position_embeddings": 256,
    "norm": "layernorm", "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": True, "gpt_j_residual": True,
    "model_parallel_size": 4, "train_iters": 40, "train_micro_batch_size_per_gpu": 4, "warmup": 0.05,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}}, "weight_decay": 0.01, "vocab_size": 64,
}  # fmt: skip
RUN = convert(NEOX, 4, neox=True)[0]
SMALL = {"vocab": 61, "hidden": 32, "layers": 4, "heads": 4, "mlp": 64}


def model(mesh, **changes):
    return ig.models.Transformer(ig.models.TransformerConfig(**(RUN["model"]["options"] | changes)), mesh, seed=1)


def batch(step):
    """Rows that count on modulo 64, each by a stride of its own."""
    start, stride = torch.randint(64, (2, RUN["batch"], 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + (1 + stride % 5) * torch.arange(RUN["data"]["length"] + 1)) % 64
    return tokens[:, :-1], tokens[:, 1:]


def engine_of(mesh):
    made = RUN["optimizer"]
    optimizer = {"lr": made["lr"], "betas": tuple(made["betas"]), "weight_decay": made["weight_decay"], "fused": True}
    return ig.Engine(model(mesh), mesh, lambda ps: torch.optim.AdamW(ps, **optimizer), clip=made["clip"])


def kept(network, step):
    """Bytes that a forward keeps for its backward, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = network(*batch(step))
    return sum(found.values()), loss


def train(layout, folder):
    mesh = ig.Mesh(layout)
    engine = engine_of(mesh)
    size, _ = kept(engine.model, 0)
    losses, times = [], []
    for step in range(RUN["steps"]):
        began = time.perf_counter()
        losses.append(engine.train_step(batch(step), 1).loss)
        times.append(time.perf_counter() - began)
    if mesh.layout.sp:
        with CheckpointManager(folder, engine) as saves:
            saves.save(RUN["steps"])
    return losses, statistics.median(times[5:]), size


def resumed(layout, folder):
    """The loss of the next step, of a checkpoint that another layout has saved."""
    engine = engine_of(ig.Mesh(layout))
    with CheckpointManager(folder, engine) as saves:
        saves.load()
    return engine.train_step(batch(RUN["steps"]), 1).loss


def case(mesh):
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].masked_fill(torch.arange(16) < torch.tensor([[3], [9], [0], [5]]), -100)
    return ig.prove.Case(model(mesh, **SMALL), (tokens[:, :-1], labels))


def picture(found, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    for layout, (losses, _, _) in found.items():
        axes[0].plot(losses, label=layout, linewidth=3 if layout == "tp4" else 1)
    axes[0].set(title="loss", xlabel="step")
    axes[0].legend()
    axes[1].bar(list(found), [RUN["batch"] * RUN["data"]["length"] / seconds for _, seconds, _ in found.values()])
    axes[1].set(title="tokens a second")
    axes[2].bar(list(found), [size / 2**20 for _, _, size in found.values()])
    axes[2].set(title="activations of a rank, MiB")
    plt.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="neox_1257.png")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        found = {layout: ig.launch(train, 4, layout, folder)[0] for layout in ("tp4", "tp4 sp")}
        for layout, (losses, seconds, size) in found.items():
            print(
                f"{layout:7} loss {losses[0]:.3f} to {losses[-1]:.3f}, {seconds * 1000:.0f} ms, {size / 2**20:.2f} MiB"
            )
        apart = max(abs(a - b) for a, b in zip(found["tp4"][0], found["tp4 sp"][0], strict=True))
        print(f"losses differ by at most {apart:.1e}")
        next_losses = {}
        for layout in ("tp4 sp", "tp2", "tp2 sp pp2"):
            ranks = ig.Layout.parse(layout).world_size
            next_losses[layout] = ig.launch(resumed, ranks, layout, folder)[0]
        print("resumed:", ", ".join(f"{layout} {loss:.6f}" for layout, loss in next_losses.items()))
    picture(found, out)
    print(f"{Path(out).name} written")
    report = ig.verify(case, ["tp4 sp", "tp2 sp pp2", "dp2 tp2 sp zero1"])
    print(report)
    ok = apart < 1e-3 and max(next_losses.values()) - min(next_losses.values()) < 1e-4
    return report.exit_code or int(not ok)


if __name__ == "__main__":
    raise SystemExit(main())
