"""Every loss, however a step is cut, has the gradient of its definition on the whole batch.

Rows are packed and uneven, a sequence has no token that counts, a prompt's completions are on both ranks, micro-batches
are without rows, and so is a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isograd as ig
from isograd import losses
from isograd.core.mesh import Mesh
from isograd.errors import EngineError
from isograd.losses import naive
from isograd.models import Transformer, TransformerConfig

ROWS, LENGTH, VOCAB, PROMPTS = 6, 8, 11, 3
# Of each row: the lengths of its sequences, and how many tokens of each count; the rest is padding.
PACKED = [((3, 5), (2, 4)), ((8,), (7,)), ((2, 4), (1, 3)), ((6,), (0,)), ((4, 4), (3, 1)), ((7,), (2,))]
PROMPT_OF = [0, 0, 1, 2, 0, 2, 1, 1, 0]  # of each sequence
Batch = dict[str, Tensor]
# The rows of each rank's micro-batches.
SPLITS: dict[str, list[list[list[int]]]] = {
    "dp1": [[[0, 1, 2, 3, 4, 5]]],
    "dp2 zero1": [[[0, 1], [], [2, 3]], [[4, 5], [], []]],
    "dp2 zero2": [[[0, 1, 2, 3], [4, 5]], [[], []]],
    "cp2 ring": [[[0, 1, 2, 3], [], [4, 5]]],
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.value = nn.Linear(5, 7), nn.Linear(7, VOCAB), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.head(h), self.value(h)[..., 0]


def batch() -> Batch:
    g = torch.Generator().manual_seed(1)
    shape = (ROWS, LENGTH)
    documents, mask = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
    prompts = torch.zeros(shape, dtype=torch.int64)
    number = 0
    for row, (lengths, counts) in enumerate(PACKED):
        at = 0
        for document, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            documents[row, at : at + length] = document
            mask[row, at + length - count : at + length] = True
            prompts[row, at : at + length] = PROMPT_OF[number]
            at, number = at + length, number + 1

    def draw(*more: int) -> Tensor:
        return torch.randn(*shape, *more, generator=g, dtype=torch.float64)

    y = torch.randint(VOCAB, shape, generator=g)
    answered = mask.clone()
    answered[3, 5] = True  # an answer of a pair has a token
    found = {
        "x": draw(5),
        "y": y,
        "mask": mask,
        "answered": answered,
        "documents": documents,
        "prompts": prompts,
        "teacher": draw(VOCAB),
    }
    found |= {"advantages": 2 * draw(), "returns": draw(), "values": draw()}
    with torch.no_grad():
        logp = log_probs(Model().double()(found["x"])[0], y)
        return found | {"old": logp + 0.3 * draw(), "reference": logp + 0.5 * draw()}


def log_probs(logits: Tensor, y: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]


def advantage(part: Batch) -> Tensor:
    """GSPO's are of sequences: that of the sequence's prompt."""
    return torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64)[part["prompts"]]


Term = tuple[Tensor, Any]
TOKENS: dict[str, Callable[[Batch, Tensor, Tensor, Tensor], Tensor]] = {
    "clip": lambda b, logp, logits, v: losses.clip(logp - b["old"], b["advantages"]),
    "dual": lambda b, logp, logits, v: losses.clip(logp - b["old"], b["advantages"], 0.2, 0.28, dual=1.5),
    "k1": lambda b, logp, logits, v: losses.kl(logp, b["reference"], "k1"),
    "k2": lambda b, logp, logits, v: losses.kl(logp, b["reference"], "k2"),
    "k3": lambda b, logp, logits, v: losses.kl(logp, b["reference"], "k3"),
    "entropy": lambda b, logp, logits, v: losses.entropy(logits),
    "value": lambda b, logp, logits, v: losses.value(v, b["returns"]),
    "value clipped": lambda b, logp, logits, v: losses.value(v, b["returns"], b["values"]),
    "forward": lambda b, logp, logits, v: losses.distil(logits, b["teacher"], temperature=2.0),
    "reverse": lambda b, logp, logits, v: losses.distil(logits, b["teacher"], "reverse"),
    "between": lambda b, logp, logits, v: losses.distil(logits, b["teacher"], "between", mix=0.3),
}


def _naive_token(kind: str, b: dict[str, Any], logp: Tensor, logits: Tensor, v: Tensor) -> Tensor:
    """The same for one token, by its definition."""
    p, q, ratio = logits.softmax(-1), b["teacher"].softmax(-1), (logp - b["old"]).exp()
    if kind in ("clip", "dual"):
        a, high = float(b["advantages"]), 0.2 if kind == "clip" else 0.28
        found = naive.clip(logp[None], b["old"][None], a, 0.2, high)[0]
        return min(found, -1.5 * a + 0 * ratio) if kind == "dual" and a < 0 else found
    r = b["reference"] - logp
    both = 0.3 * q + 0.7 * p
    soft = (logits / 2).softmax(-1), (b["teacher"] / 2).softmax(-1)
    error, kept = v - b["returns"], b["values"] + min(max(v - b["values"], v * 0 - 0.2), v * 0 + 0.2) - b["returns"]
    return {
        "k1": lambda: -r, "k2": lambda: r * r / 2, "k3": lambda: r.exp() - 1 - r,
        "entropy": lambda: -(p * p.log()).sum(), "value": lambda: error**2 / 2,
        "value clipped": lambda: max(error**2, kept**2) / 2,
        "forward": lambda: 4 * (soft[1] * (soft[1] / soft[0]).log()).sum(),
        "reverse": (p * (p / q).log()).sum,
        "between": lambda: 0.3 * (q * (q / both).log()).sum() + 0.7 * (p * (p / both).log()).sum(),
    }[kind]()  # fmt: skip


MEANS = ("of_tokens", "of_sequences", "of_length", "of_prompts")
PAIRS = ("dpo", "ipo", "simpo", "orpo", "kto")
KINDS = [
    *(f"clip {mean}" for mean in MEANS),
    *(f"{kind} of_tokens" for kind in TOKENS if kind != "clip"),
    "gspo",
    *PAIRS,
]


def shares(whole: Batch, mesh: Mesh) -> dict[str, losses.Share]:
    """Of this data rank's rows of the step."""
    mask, documents = whole["mask"], whole["documents"]
    tokens = losses.tokens_of_prompts(mask, whole["prompts"], PROMPTS, mesh)
    return {
        "of_tokens": losses.of_tokens(mask),
        "of_sequences": losses.of_sequences(mask, documents),
        "of_length": losses.of_length(mask, 5, documents),
        "of_prompts": losses.of_prompts(mask, whole["prompts"], tokens),
    }


def term(kind: str, model: nn.Module, b: Batch, share: dict[str, losses.Share], mesh: Mesh) -> Term:
    """The loss of one micro-batch, of the places that are here."""
    logits, values = model(b["x"])
    logp = log_probs(logits, b["y"])
    name, _, mean = kind.partition(" of_")
    if mean:
        return losses.mean(TOKENS[name](b, logp, logits, values), share[f"of_{mean}"])
    number = int(b["number"])
    if kind == "gspo":
        ratio = losses.sequence_log_ratio(logp, b["old"], b["mask"], b["sequences"], number, mesh)
        return losses.mean(losses.clip(ratio, advantage(b), 0.1, 0.1), share["of_sequences"])
    gather = losses.sequence_means if kind in ("simpo", "orpo") else losses.sequence_sums
    answers = gather(logp, b["answered"], b["rows"], len(b["x"]), mesh)  # a row is an answer
    known = gather(b["reference"], b["answered"], b["rows"], len(b["x"]), mesh)
    if kind == "kto":
        return losses.mean_of_sequences(losses.kto(answers, known, b["row"] % 2 == 0, 0.2), mesh)
    pairs = answers[0::2], answers[1::2]
    of = getattr(losses, kind)
    each = of(*pairs) if kind in ("simpo", "orpo") else of(*pairs, known[0::2], known[1::2])
    return losses.mean_of_sequences(each, mesh)


def micro(
    whole: Batch, share: dict[str, losses.Share], rows: slice, mesh: Mesh
) -> tuple[Batch, dict[str, losses.Share]]:
    """Some rows, and of them the places of this cp rank."""
    b = {name: t[rows] for name, t in whole.items()}
    b["sequences"] = losses.numbered(b["mask"], b["documents"])
    b["number"] = b["sequences"].max() + 1 if len(b["x"]) else torch.tensor(0)
    b["rows"] = losses.numbered(b["mask"])
    half = slice(mesh.index("cp") * LENGTH // mesh.size("cp"), (mesh.index("cp") + 1) * LENGTH // mesh.size("cp"))
    cut = {name: t[:, half] if t.dim() > 1 else t for name, t in b.items()}
    return cut, {name: losses.Share(s.factors[rows][:, half], s.counts[rows][:, half]) for name, s in share.items()}


def trained(layout: str, kinds: list[str]) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """The loss and the gradients of each kind."""
    mesh = Mesh(layout)
    mine = SPLITS[layout][mesh.index("dp")]
    whole = {
        name: t[[row for rows in mine for row in rows]] for name, t in (batch() | {"row": torch.arange(ROWS)}).items()
    }
    share, found = shares(whole, mesh), {}
    for kind in kinds:
        model = Model().double()
        engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
        at = 0
        for number, rows in enumerate(mine):
            b, s = micro(whole, share, slice(at, at + len(rows)), mesh)
            loss, weight = term(kind, model, b, s, mesh)
            if number == len(mine) - 1:
                engine.backward(loss, weight=weight)
            else:
                with engine.no_sync():
                    engine.backward(loss, weight=weight)
            at += len(rows)
        grads = {name: g.clone() for name, g in engine.grads().items()}
        found[kind] = engine.step().loss, grads
    return found


def defined(kind: str) -> tuple[float, dict[str, Tensor]]:
    """The same on the whole batch, by naive.py and plain autograd."""
    model, b = Model().double(), batch()
    logits, values = model(b["x"])
    logp = log_probs(logits, b["y"])
    where = [
        [(row, place) for place in range(LENGTH) if b["documents"][row, place] == d and b["mask"][row, place]]
        for row, (lengths, _) in enumerate(PACKED)
        for d in range(len(lengths))
    ]

    def gather(t: Tensor, places: list[tuple[int, int]]) -> Tensor:
        return torch.stack([t[p] for p in places]) if places else t.new_zeros(0)

    name, _, mean = kind.partition(" of_")
    if mean:

        def each(p: tuple[int, int]) -> Tensor:
            return _naive_token(name, {k: t[p] for k, t in b.items()}, logp[p], logits[p], values[p])

        lists = [torch.stack([each(p) for p in places]) if places else logp.new_zeros(0) for places in where]
        more = {"length": (5,), "prompts": (PROMPT_OF,)}.get(mean, ())
        loss = getattr(naive, f"of_{mean}")(lists, *more)
    elif kind == "gspo":
        one = [
            naive.gspo(gather(logp, p), gather(b["old"], p), float(advantage(b)[p[0]]), 0.1, 0.1) for p in where if p
        ]
        loss = torch.cat(one).mean()
    else:
        answers = [[(row, place) for place in range(LENGTH) if b["answered"][row, place]] for row in range(ROWS)]
        mine = [(gather(logp, p), gather(b["reference"], p)) for p in answers]
        if kind == "kto":
            every = [naive.kto(a, r, row % 2 == 0, 0.2, 0.1) for row, (a, r) in enumerate(mine)]
        else:
            args = {"dpo": (0.1,), "ipo": (0.1,), "simpo": (2.0, 1.0), "orpo": ()}[kind]
            pairs = [(mine[i], mine[i + 1]) for i in range(0, ROWS, 2)]
            known = [(c[1], r[1]) if kind in ("dpo", "ipo") else () for c, r in pairs]
            every = [getattr(naive, kind)(c[0], r[0], *k, *args) for (c, r), k in zip(pairs, known, strict=True)]
        loss = torch.stack(every).mean()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return float(loss.detach()), {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(model.named_parameters(), found, strict=True)
    }


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a parameter, of the norm of the whole gradient."""
    assert found.keys() == expected.keys()
    size = torch.cat([g.reshape(-1) for g in expected.values()]).norm()
    return max(float((found[name] - g).norm() / size) for name, g in expected.items())


@pytest.fixture(scope="module")
def definitions() -> dict[str, tuple[float, dict[str, Tensor]]]:
    return {kind: defined(kind) for kind in KINDS}


@pytest.mark.parametrize("layout", SPLITS)
def test_however_a_step_is_cut_its_gradient_is_that_of_the_definition(worlds, definitions, layout: str) -> None:
    for found in worlds(1 if layout == "dp1" else 2).run(trained, layout, KINDS):
        for kind in KINDS:
            loss, gradients = definitions[kind]
            assert found[kind][0] == pytest.approx(loss, rel=1e-9), kind
            assert apart(found[kind][1], gradients) < 1e-9, kind


def together(layout: str) -> tuple[float, dict[str, Tensor]]:
    """A policy's loss with a penalty and a bonus, each with its own mean, in one step of terms."""
    mesh = Mesh(layout)
    mine = SPLITS[layout][mesh.index("dp")]
    whole = {name: t[[row for rows in mine for row in rows]] for name, t in batch().items()}
    share, model = shares(whole, mesh), Model().double()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    cut = micro(whole, share, slice(0, len(whole["x"])), mesh)[1]
    engine.begin(policy=cut["of_prompts"].counts.sum(), kl=cut["of_sequences"].counts.sum(),
                 entropy=cut["of_tokens"].counts.sum())  # fmt: skip
    at = 0
    for rows in mine:
        b, s = micro(whole, share, slice(at, at + len(rows)), mesh)
        at += len(rows)
        logits, _ = model(b["x"])
        logp = log_probs(logits, b["y"])
        engine.backward(
            ig.Terms(
                policy=losses.mean(losses.clip(logp - b["old"], b["advantages"]), s["of_prompts"]),
                kl=(*losses.mean(losses.kl(logp, b["reference"]), s["of_sequences"]), 0.05),
                entropy=(*losses.mean(losses.entropy(logits), s["of_tokens"]), -0.01),
            )
        )
    grads = dict(engine.grads().items())
    return engine.step().loss, {name: g.clone() for name, g in grads.items()}


@pytest.mark.parametrize("layout", ["dp2 zero1", "cp2 ring"])
def test_terms_of_different_means_add_up(worlds, layout: str) -> None:
    parts = {"clip of_prompts": 1.0, "k3 of_sequences": 0.05, "entropy of_tokens": -0.01}
    each = {kind: defined(kind) for kind in parts}
    loss = sum(c * each[kind][0] for kind, c in parts.items())
    names = each["k3 of_sequences"][1]
    expected = {name: sum((c * each[kind][1][name] for kind, c in parts.items()), torch.tensor(0.0)) for name in names}
    for found in worlds(2).run(together, layout):
        assert found[0] == pytest.approx(loss, rel=1e-9)
        assert apart(found[1], expected) < 1e-9


def of_transformer(layout: str) -> tuple[float, dict[str, Tensor]]:
    """GSPO, a KL and DPO in one step, from the logits of whole rows, which every cp and tp rank has."""
    mesh, b = Mesh(layout), batch()
    config = TransformerConfig(vocab=VOCAB, hidden=8, layers=1, heads=2, mlp=12)
    model = Transformer(config, mesh, dtype=torch.float64)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    logp = log_probs(model(b["y"].roll(1, 1), documents=b["documents"]), b["y"])
    share, number = losses.of_sequences(b["mask"], b["documents"]), losses.numbered(b["mask"], b["documents"])
    ratio = losses.sequence_log_ratio(logp, b["old"], b["mask"], number, int(number.max()) + 1)
    answers, known = (
        losses.sequence_sums(t, b["answered"], losses.numbered(b["mask"]), ROWS) for t in (logp, b["reference"])
    )
    pairs = losses.dpo(answers[0::2], answers[1::2], known[0::2], known[1::2])
    engine.backward(
        ig.Terms(
            policy=losses.mean(losses.clip(ratio, advantage(b)), share),
            kl=(*losses.mean(losses.kl(logp, b["reference"], "k2"), share), 0.05),
            pairs=losses.mean_of_sequences(pairs),
        )
    )
    grads = {name: g.clone() for name, g in engine.grads().items()}
    return engine.step().loss, grads


def test_a_loss_of_the_logits_of_a_transformer_has_one_gradient_under_tp_and_cp(worlds) -> None:
    expected = worlds(1).run(of_transformer, "dp1")[0]
    for layout in ("tp2 sp", "cp2 ring", "cp2 ulysses zero2"):
        for loss, gradients in worlds(2).run(of_transformer, layout):
            assert loss == pytest.approx(expected[0], rel=1e-9), layout
            assert apart(gradients, expected[1]) < 1e-9, layout


def test_a_mean_of_local_means_is_not_the_definition(definitions) -> None:
    """What the weights are for: the mean over ranks of each rank's token mean is another loss on this batch."""
    b = batch()
    logp = log_probs(Model().double()(b["x"])[0], b["y"])
    each = losses.clip(logp - b["old"], b["advantages"])
    local = [losses.mean(each[rows], losses.of_tokens(b["mask"][rows]))[0] for rows in (slice(0, 4), slice(4, 6))]
    assert abs(float(torch.stack(local).mean().detach()) - definitions["clip of_tokens"][0]) > 1e-3


def test_a_token_without_a_factor_is_not_looked_at_and_shapes_must_agree() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    each = torch.tensor([[2.0, torch.nan], [torch.inf, 1.0]], requires_grad=True)
    value, weight = losses.mean(each, losses.of_tokens(mask))
    value.backward()
    assert (float(value.detach()), float(weight), each.grad.tolist()) == (2.0, 1.0, [[1.0, 0.0], [0.0, 0.0]])  # type: ignore[union-attr]
    value, weight = losses.mean(each[1:], losses.of_sequences(mask[1:]))
    assert (float(value.detach()), float(weight)) == (0.0, 0.0)
    with pytest.raises(EngineError, match="IG575"):
        losses.mean(each[:1], losses.of_tokens(mask))


def test_advantages_are_centred_and_scaled_in_each_group_however_uneven() -> None:
    rewards, prompts = torch.tensor([1.0, 3.0, 5.0, 7.0, 2.0]), torch.tensor([0, 0, 1, 0, 2])
    found = losses.group_advantages(rewards, prompts, eps=0.0)
    group = rewards[prompts == 0]
    assert found[prompts == 0].tolist() == pytest.approx(((group - group.mean()) / group.std()).tolist())
    plain = losses.group_advantages(rewards, prompts, scale=False)
    assert plain.tolist() == pytest.approx([-8 / 3, -2 / 3, 0, 10 / 3, 0])
    assert losses.group_advantages(rewards, prompts)[2] == 0  # alone in its group
