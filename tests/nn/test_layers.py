"""Each layer equals its one-device definition, forward and every gradient by name, under tp with and without sp.

The oracles are a few lines of plain torch on full weights. A parallel gradient is what the contract promises: this
rank's, summed over the axes it owes, put together from shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.group import even_sizes
from isograd.core import rng
from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.models import TransformerConfig
from isograd.nn import (
    MLP,
    Attention,
    ColumnLinear,
    Head,
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    Rotary,
    Stream,
    VocabEmbedding,
    gather_tokens,
)
from isograd.nn.stream import token_ids

TOKENS, HIDDEN, BATCH = 24, 12, 2
KEY = rng.key(0, "layers")
F64 = {"dtype": torch.float64}
Weights = dict[str, Tensor]


def stream(key: rng.Key | None = None) -> Stream:
    length = TOKENS // BATCH
    return Stream(BATCH, length, torch.arange(length).repeat(BATCH), token_ids(torch.tensor([5, 2]), length), key)


def tokens() -> Tensor:
    return torch.randint(37, (TOKENS,), generator=torch.Generator().manual_seed(8))


# Each case: (a module whose forward maps my part of the stream to the layer's output, whether that is the whole output,
#             the definition on full weights)


class ColumnAlone(nn.Module):
    """A column-parallel map between its two doors; the output is gathered over features to be compared."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.inner = mesh, ColumnLinear(HIDDEN, 19, mesh, key=KEY, bias=True, **F64)

    def forward(self, x: Tensor) -> Tensor:
        sizes = list(even_sizes(19, self.mesh.size("tp")))
        return ops.gather_for_identical_use(self.inner(gather_tokens(x, self.mesh)), self.mesh.group("tp"), 1, sizes)


class WithStream(nn.Module):
    """A layer that is told about its tokens."""

    def __init__(
        self, inner: nn.Module, angles: tuple[Tensor, Tensor] | None = None, key: rng.Key | None = None
    ) -> None:
        super().__init__()
        self.inner, self.angles, self.key = inner, angles, key

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, Attention):
            return self.inner(x, stream(self.key), self.angles)
        return self.inner(x, stream())


class Lookup(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.inner = VocabEmbedding(37, HIDDEN, mesh, key=KEY, **F64)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(tokens())


def labels() -> Tensor:
    wanted = tokens().roll(1)
    wanted[::5] = -100
    return wanted


class LossAlone(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.inner = Head(37, HIDDEN, mesh, key=KEY, std=0.5, **F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, labels())[0]


class LogitsAlone(LossAlone):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner.logits(x)


ROTARY = Rotary(4, 10000.0)


def attention(mesh: Mesh, kv: int, rotary: Rotary | None = None, **options: Any) -> Attention:
    config = TransformerConfig(
        vocab=1, hidden=HIDDEN, layers=1, heads=4, kv_heads=kv, head_dim=6, mlp=1, init_std=0.4, **options
    )
    return Attention(config, mesh, key=KEY, rotary=rotary, **F64)  # type: ignore[arg-type]


def plain_attention(w: Weights, x: Tensor, kv: int, rotary: bool = False, norm: bool = False, bias: bool = False,
                    drop: bool = False) -> Tensor:  # fmt: skip
    """Loops over batch and heads; nothing is shared with the layer."""
    length = TOKENS // BATCH
    q, k, v = (F.linear(x, w[f"inner.{n}.weight"], w.get(f"inner.{n}.bias")) for n in "qkv")
    rows = []
    for b in range(BATCH):
        part = slice(b * length, (b + 1) * length)
        heads = []
        for h in range(4):
            g = h // (4 // kv)
            qh, kh, vh = q[part, 6 * h : 6 * h + 6], k[part, 6 * g : 6 * g + 6], v[part, 6 * g : 6 * g + 6]
            if norm:
                qh, kh = (t / (t.square().mean(1, keepdim=True) + 1e-6).sqrt() for t in (qh, kh))
                qh, kh = qh * w["inner.q_norm.weight"], kh * w["inner.k_norm.weight"]
            if rotary:
                qh, kh = plain_rotary(qh), plain_rotary(kh)
            scores = qh @ kh.T / 6**0.5
            probabilities = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(1)
            if drop:
                ids = stream().ids[part]
                kept = rng.keep(0.3, KEY.fold("attention"), ids, h * (1 << 32) + torch.arange(length))
                probabilities = probabilities * kept / 0.7
            heads.append(probabilities @ vh)
        rows.append(torch.cat(heads, 1))
    return F.linear(torch.cat(rows), w["inner.out.weight"], w.get("inner.out.bias"))


def plain_rotary(x: Tensor) -> Tensor:
    """Pairs (i, i + 2) of the first four features turn by position * 10000 ** (-i / 2)."""
    angle = torch.arange(len(x)).float()[:, None] * (1.0 / 10000.0 ** (torch.arange(0, 4, 2).float() / 4))
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[:, :2], x[:, 2:4]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[:, 4:]), 1)


def angles() -> tuple[Tensor, Tensor]:
    return ROTARY.table(stream().positions, torch.float64)


Case = tuple[Callable[[Mesh], nn.Module], bool, Callable[[Weights, Tensor], Tensor]]
CASES: dict[str, Case] = {
    "column linear": (ColumnAlone, True, lambda w, x: F.linear(x, w["inner.weight"], w["inner.bias"])),
    "mlp gated": (
        lambda m: MLP(HIDDEN, 17, m, key=KEY, std=0.5, **F64), False,
        lambda w, x: (F.silu(x @ w["gate.weight"].T) * (x @ w["up.weight"].T)) @ w["down.weight"].T,
    ),
    "mlp plain with bias": (
        lambda m: MLP(HIDDEN, 17, m, key=KEY, activation="gelu_tanh", gated=False, bias=True, std=0.5, **F64), False,
        lambda w, x: F.linear(
            F.gelu(F.linear(x, w["up.weight"], w["up.bias"]), approximate="tanh"), w["down.weight"], w["down.bias"]),
    ),
    "rms norm": (
        lambda m: RMSNorm(HIDDEN, m, **F64), False,
        lambda w, x: w["weight"] * x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt(),
    ),
    "layer norm": (
        lambda m: LayerNorm(HIDDEN, m, **F64), False,
        lambda w, x: w["bias"] + w["weight"] * (x - x.mean(1, keepdim=True))
        / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt(),
    ),
    "embedding": (Lookup, False, lambda w, x: x * w["inner.weight"][tokens()]),
    "learned positions": (
        lambda m: WithStream(LearnedPositions(TOKENS, HIDDEN, m, key=KEY, **F64)), False,
        lambda w, x: x + w["inner.weight"][: TOKENS // BATCH].repeat(BATCH, 1),
    ),
    "attention": (lambda m: WithStream(attention(m, 4)), False, lambda w, x: plain_attention(w, x, 4)),
    "attention grouped, biases": (
        lambda m: WithStream(attention(m, 2, qkv_bias=True, out_bias=True)), False,
        lambda w, x: plain_attention(w, x, 2, bias=True),
    ),
    "attention one kv head, rotary, q/k norm": (
        lambda m: WithStream(attention(m, 1, rotary=ROTARY, qk_norm=True), angles()), False,
        lambda w, x: plain_attention(w, x, 1, rotary=True, norm=True),
    ),
    "attention with dropout": (
        lambda m: WithStream(attention(m, 2, attention_dropout=0.3), key=KEY), False,
        lambda w, x: plain_attention(w, x, 2, drop=True),
    ),
    "loss": (
        LossAlone, True, lambda w, x: F.cross_entropy(x @ w["inner.weight"].T, labels(), ignore_index=-100),
    ),
    "logits": (LogitsAlone, True, lambda w, x: x @ w["inner.weight"].T),
}  # fmt: skip


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64),
        torch.randn(TOKENS, 64, generator=generator, dtype=torch.float64),
    )


def share(mesh: Mesh, x: Tensor) -> Tensor:
    """My rows of the stream."""
    if not mesh.layout.sp:
        return x
    return x.chunk(mesh.size("tp"))[mesh.index("tp")]


def run_layer(layout: str, name: str) -> tuple[Tensor, Tensor, Weights, Weights]:
    """(output, gradient of the input, gradients of the weights, weights), all whole."""
    mesh = Mesh(layout)
    make, whole_output, _ = CASES[name]
    layer = make(mesh)
    with torch.no_grad():  # ones and zeros would hide a misplaced norm weight or bias
        for record in contracts(layer, mesh):
            if record.parameter.dim() == 1:
                box = tuple(slice(*b) for b in record.contract.local(mesh))
                full = torch.randn(
                    record.contract.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
                )
                record.parameter.copy_(full[box])
    full_x, seed = inputs()
    x = share(mesh, full_x).clone().requires_grad_()
    y = layer(x)
    cotangent = seed[: len(full_x), : y.shape[-1]] if y.dim() else torch.tensor(1.0)
    y.backward(cotangent if whole_output else share(mesh, cotangent))
    group, sp = mesh.group("tp"), mesh.layout.sp
    gradients, weights = {}, {}
    for record in contracts(layer, mesh):
        gradient = record.parameter.grad
        for axes in record.contract.partial_over:
            gradient = raw.all_reduce(gradient, mesh.group(axes))
        gradients[record.name] = assemble(gradient, record.contract, mesh)
        weights[record.name] = assemble(record.parameter.detach(), record.contract, mesh)
    together = (lambda t: ops.all_gather(t, group)) if sp else (lambda t: t)
    return (y.detach() if whole_output else together(y.detach())), together(x.grad), gradients, weights


@pytest.mark.parametrize("layout", ["1", "tp2", "tp2 sp", "tp4", "tp4 sp"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_its_one_device_definition(worlds, name: str, layout: str) -> None:
    full_x, seed = inputs()
    for y, dx, gradients, weights in worlds(Mesh.unbound(layout).layout.world_size).run(run_layer, layout, name):
        w = {n: t.clone().requires_grad_() for n, t in weights.items()}
        x = full_x.clone().requires_grad_()
        expected = CASES[name][2](w, x)
        expected.backward(seed[:, : expected.shape[-1]] if expected.dim() else torch.tensor(1.0))
        close(y, expected.detach(), "output")
        close(dx, x.grad, "gradient of the input")
        for n, weight in w.items():
            close(gradients[n], weight.grad, f"gradient of {n}")


def close(found: Tensor, expected: Tensor | None, what: str) -> None:
    assert expected is not None
    error = float((found - expected).norm())
    assert error <= 1e-12 * max(float(expected.norm()), 1.0), f"{what}: error {error:.1e}"


def counts(layout: str, chunk: int) -> tuple[float, int, float]:
    from isograd.nn import cross_entropy

    mesh = Mesh(layout)
    head = Head(37, HIDDEN, mesh, key=KEY, std=0.5, **F64)
    x = inputs()[0].requires_grad_()
    mean, count = cross_entropy(x, head.weight, labels(), mesh, chunk=chunk)
    none, zero = cross_entropy(x, head.weight, torch.full_like(labels(), -100), mesh)
    none.backward()
    assert int(zero) == 0
    assert float(none.detach()) == 0.0
    assert float(x.grad.abs().sum()) == 0.0
    return float(mean.detach()), int(count), float(mean.detach()) * int(count)


@pytest.mark.parametrize("layout", ["1", "tp2", "tp4"])
@pytest.mark.parametrize("chunk", [1, 7, 24, 1000])
def test_the_loss_does_not_depend_on_chunks_and_is_zero_over_no_label(worlds, layout: str, chunk: int) -> None:
    x, weight = inputs()[0], Head(37, HIDDEN, Mesh.unbound("1"), key=KEY, std=0.5, **F64).weight.detach()
    expected = float(F.cross_entropy(x @ weight.T, labels()))
    for mean, count, _ in worlds(Mesh.unbound(layout).layout.world_size).run(counts, layout, chunk):
        assert abs(mean - expected) < 1e-12
        assert count == int((labels() != -100).sum())
