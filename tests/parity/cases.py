"""What the parity grid compares: three small models, uneven data, a layout's training and one device's.

The one device is plain torch: autograd on (sum of losses over all tokens) / (number of all tokens), torch's own clip
and SGD with momentum. Nothing of isograd's engine is in it.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from isograd.core import rng
from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.launcher.launch import World
from isograd.models import Transformer, TransformerConfig

TOLERANCE = 1e-9  # of each tensor's and each block's norm; fp64 noise here is 1e-15
FLOOR = 1e-6  # of the whole gradient: tensors whose true gradient is zero (key biases) are judged on it
CLIP = 0.5
STEPS = 2
BATCH, LENGTH = 3, 7  # odd on purpose: no axis divides 21 tokens but 3

MODELS: dict[str, TransformerConfig] = {
    "llama": TransformerConfig(vocab=101, hidden=24, layers=2, heads=8, head_dim=4, mlp=41),
    "gpt2": TransformerConfig(
        vocab=97,
        hidden=24,
        layers=2,
        heads=8,
        head_dim=4,
        mlp=37,
        norm="layer",
        activation="gelu_tanh",
        gated=False,
        positions="learned",
        max_positions=LENGTH,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        dropout=0.2,
        attention_dropout=0.2,
    ),
    "qwen": TransformerConfig(
        vocab=101,
        hidden=24,
        layers=2,
        heads=8,
        kv_heads=2,
        head_dim=6,
        mlp=40,
        qk_norm=True,
        tied=True,
    ),
}
# For cp: heads that it does not divide, and what a ring can run of the model with all dropouts.
MODELS_OF_CP: dict[str, TransformerConfig] = {
    "nine": TransformerConfig(vocab=101, hidden=24, layers=2, heads=9, kv_heads=3, head_dim=4, mlp=41, qkv_bias=True),
    "gpt2-ring": replace(MODELS["gpt2"], attention_dropout=0.0),
    "four": TransformerConfig(vocab=101, hidden=24, layers=2, heads=4, head_dim=6, mlp=41),
}
# For pp: layers that no number of stages divides; "deeper" for eight stages.
MODELS_OF_PP: dict[str, TransformerConfig] = {
    "deep": replace(MODELS["llama"], layers=5),
    "deep-tied": replace(MODELS["gpt2"], layers=5, attention_dropout=0.0),
    "deeper": replace(MODELS["llama"], layers=9),
    "deeper-tied": replace(MODELS["gpt2"], layers=9, attention_dropout=0.0),
}
CONFIGS = MODELS | MODELS_OF_CP | MODELS_OF_PP


@dataclass(frozen=True)
class Text:
    """What a micro-batch is like."""

    rows: int = BATCH
    length: int = LENGTH
    packed: bool = False  # several documents in each sequence
    early: bool = False  # only the first two tokens of a sequence have labels: most cp ranks have none


@dataclass
class Trained:
    """What a run of STEPS steps did. Gradients are of every step, whole, before clip."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[tuple[float, float]] = field(default_factory=list)  # engine.evaluate's (loss, weight); pp only
    weights: list[float] = field(default_factory=list)
    replicas: dict[str, str] = field(default_factory=dict)  # hash of each local parameter, by name and box
    stepped: set[str] = field(default_factory=set)  # on which devices the optimizer steps
    settled: str = ""  # hash of gradients, parameters, losses, norms: for bitwise comparison between stages


def micro_batch(
    config: TransformerConfig, step: int, index: int, of: int, text: Text = Text()
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, sample ids). Label counts differ everywhere; the last micro-batch of several has none."""
    generator = torch.Generator().manual_seed(7919 * step + index)
    window = torch.randint(config.vocab, (text.rows, text.length + 1), generator=generator)
    labels = window[:, 1:].clone()
    for row in range(text.rows):
        labels[row, : (index * 3 + row * 2 + step) % (2 if text.early else text.length)] = -100
    if text.early:
        labels[:, 2:] = -100
    if of > 1 and index == of - 1:
        labels[:] = -100
    return window[:, :-1], labels, torch.arange(text.rows) + text.rows * index


def documents_of(labels: Tensor, text: Text) -> Tensor | None:
    """Uneven documents packed into each row: rows of two, three and one."""
    if not text.packed:
        return None
    documents = torch.zeros_like(labels)
    documents[0::3, 3:] = 4
    documents[1::3, 1:] = 1
    documents[1::3, 5:] = 0
    return documents


def dropout_key(step: int) -> rng.Key:
    return rng.key(11, step)


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


@lru_cache
def one_device(
    model_name: str, micro_batches: int, dtype: torch.dtype = torch.float64, order: int = 1, text: Text = Text()
) -> Trained:
    """The truth. `order` -1 adds micro-batches up backwards and row by row: the same sum, associated differently."""
    config = CONFIGS[model_name]
    model = Transformer(config, Mesh.unbound("1"), dtype=dtype)
    optimizer, done = sgd(list(model.parameters())), Trained()
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [micro_batch(config, step, i, micro_batches, text) for i in range(micro_batches)][::order]
        tokens_of_step = sum(int((labels != -100).sum()) for _, labels, _ in batches)
        total = 0.0
        for tokens, labels, samples in batches:
            documents = documents_of(labels, text)
            for row in range(text.rows) if order == -1 else [slice(None)]:
                part = slice(row, row + 1) if isinstance(row, int) else row
                loss, count = model(
                    tokens[part],
                    labels[part],
                    key=dropout_key(step),
                    samples=samples[part],
                    documents=None if documents is None else documents[part],
                )
                (loss * count / tokens_of_step).backward()
                total += float(loss.detach()) * int(count)
        done.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        done.losses.append(total / tokens_of_step)
        done.norms.append(float(torch.nn.utils.clip_grad_norm_(list(model.parameters()), CLIP)))
        optimizer.step()
    done.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return done


def train(
    layout: str,
    model_name: str,
    accumulation: int,
    dtype: torch.dtype = torch.float64,
    no_sync: bool = False,
    reproducible: bool = False,
    text: Text = Text(),
    recompute: bool | str = False,
    steps: int = STEPS,
    offload: bool = False,
) -> Trained:
    """The same training on this rank of a world. Runs inside every rank, on its device."""
    mesh, config = Mesh(layout), CONFIGS[model_name]
    model = Transformer(config, mesh, dtype=dtype).to(mesh.device)
    model.recompute = recompute
    engine = Engine(model, mesh, sgd, clip=CLIP, bucket_mb=0.01, reproducible=reproducible, offload=offload)
    table, done = contracts(model, mesh), Trained()
    micro_batches = accumulation * mesh.size("dp")  # cp and pp ranks are given the same sequences
    for step in range(steps):
        micros = []
        for j in range(accumulation):
            index = mesh.index("dp") * accumulation + j
            tokens, labels, samples = micro_batch(config, step, index, micro_batches, text)
            about = {"key": dropout_key(step), "samples": samples, "documents": documents_of(labels, text)}
            given = {"tokens": tokens, "labels": labels, **about}
            micros.append({n: t.to(mesh.device) if isinstance(t, Tensor) else t for n, t in given.items()})
        if mesh.size("pp") > 1:
            evaluation = engine.evaluate(micros)
            done.evaluated.append((evaluation.loss, evaluation.weight))
            engine.accumulate(micros)
        else:
            for micro in micros:
                loss, count = model(**micro)
                with engine.no_sync() if no_sync and micro is not micros[-1] else nullcontext():
                    engine.backward(loss, weight=count)
        done.gradients.append({name: g.clone() for name, g in engine.grads().items()})
        stats = engine.step()
        done.losses.append(stats.loss)
        done.norms.append(stats.grad_norm)
        done.weights.append(stats.weight)
    done.stepped = {p.device.type for group in engine.optimizer.param_groups for p in group["params"]}
    with torch.no_grad(), engine.full_parameters():
        done.parameters = {r.name: assemble(r.parameter, r.contract, mesh).clone() for r in table}
        done.replicas = {f"{r.name}{r.contract.local(mesh)}": _hash(r.parameter.detach()) for r in table}
    done.settled = _hash(
        *(gradient for gradients in done.gradients for gradient in gradients.values()),
        *done.parameters.values(),
        torch.tensor(done.losses + done.norms, dtype=torch.float64),
    )
    return done


def _hash(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def on_layout(world: World, layout: str, *args: object, **kwargs: object) -> list[Trained]:
    return world.run(partial(train, layout, *args, **kwargs))


def blocks(t: Tensor) -> list[Tensor]:
    """A tensor and its parts: heads, experts and shard borders lie on some of these cuts."""
    return [t, *t.tensor_split(8, 0), *(t.tensor_split(8, 1) if t.dim() > 1 else ())]


def differences(found: Trained, truth: Trained) -> list[str]:
    """Everything in which a run is not one device's, in words; empty when it is."""
    wrong: list[str] = []
    for step, (ours, theirs) in enumerate(zip(found.gradients, truth.gradients, strict=True)):
        whole = float(torch.stack([g.norm() for g in theirs.values()]).norm())
        if ours.keys() != theirs.keys():
            wrong.append(f"gradients of {sorted(ours.keys() ^ theirs.keys())} on one side only")
        for name in sorted(ours.keys() & theirs.keys()):
            for mine, expected in zip(blocks(ours[name]), blocks(theirs[name]), strict=True):
                error = float((mine - expected).norm())
                if not error <= TOLERANCE * max(float(expected.norm()), FLOOR * whole):
                    wrong.append(
                        f"gradient of {name} in step {step}: error {error:.1e} of {float(expected.norm()):.1e}"
                    )
                    break
    whole = float(torch.stack([p.norm() for p in truth.parameters.values()]).norm())
    for name, value in found.parameters.items():
        expected = truth.parameters[name]
        error = float((value - expected).norm())
        if not error <= TOLERANCE * max(float(expected.norm()), FLOOR * whole):
            wrong.append(f"parameter {name} after the steps: error {error:.1e}")
    numbers = [("loss", found.losses, truth.losses), ("norm", found.norms, truth.norms)]
    if found.evaluated:
        numbers += [("evaluation", [loss for loss, _ in found.evaluated], truth.losses)]
        numbers += [("weight of an evaluation", [weight for _, weight in found.evaluated], found.weights)]
    for what, ours, theirs in numbers:
        if not all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours, theirs, strict=True)):
            wrong.append(f"{what}: {ours} instead of {theirs}")
    return wrong


def replicas_apart(results: list[Trained]) -> list[str]:
    """Parameters of which two ranks hold the same part with different bytes."""
    first: dict[str, str] = {}
    apart = []
    for result in results:
        for place, digest in result.replicas.items():
            if first.setdefault(place, digest) != digest:
                apart.append(place)
    unequal = {(tuple(r.losses), tuple(r.norms)) for r in results}
    return apart + (["stats differ between ranks"] if len(unequal) > 1 else [])


@dataclass(frozen=True)
class Case:
    layout: str
    model: str
    accumulation: int
    reproducible: bool = False
    text: Text = Text()
    recompute: bool | str = False

    def run(self) -> Trained:
        """On this rank of a world."""
        how = {"reproducible": self.reproducible, "text": self.text, "recompute": self.recompute}
        return train(self.layout, self.model, self.accumulation, **how)  # type: ignore[arg-type]

    def wrong(self, results: list[Trained]) -> list[str]:
        """All that is wrong with the ranks' results."""
        layout = Layout.parse(self.layout)
        truth = one_device(self.model, self.accumulation * layout.dp, text=self.text)
        everything = {name: value for result in results for name, value in result.parameters.items()}
        wrong = differences(replace(results[0], parameters=everything), truth)
        lost = sorted(truth.parameters.keys() - everything.keys())
        wrong += [f"nobody holds {lost}"] if lost else []
        return wrong + [f"replicas differ: {place}" for place in replicas_apart(results)]
