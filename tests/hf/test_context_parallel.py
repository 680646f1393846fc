"""Unmodified transformers models under cp have, by name, the gradients that transformers has on one device.

fp64, 1e-9. Two micro-batches of different lengths, both forwarded before either goes backward; rows that end in pads;
labels that differ between ranks, and ranks without any. The reference never sees isograd: it is given the whole batch.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf import attach, shard
from isograd.hf.losses import RowScores
from tests.sizes import sized

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 31}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "smollm": ("llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 8}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 64}),
    "narrow": ("mistral", {**GROUPED, "sliding_window": 4}),
    "granite": ("granite", {**GROUPED, "attention_multiplier": 0.7, "residual_multiplier": 0.6}),  # scales of its own
    "neox": ("gpt_neox", {**COMMON, "rotary_pct": 0.5, "use_parallel_residual": False}),
}
LAYOUTS = ["cp2 ulysses zero2", "cp2 ring", "cp3 ring zero1", "cp4 ulysses2", "cp4 ulysses", "dp2 cp2 ring zero1"]
KINDS = ["first labels only", "packed", "checkpoint", "reentrant checkpoint", "one row"]
FAMILIES = [  # each family under two layouts, and each layout with two families; all others in `make full`
    pytest.param(name, layout, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
    for i, name in enumerate(MODELS)
    for j, layout in enumerate(LAYOUTS)
]
BATCHES = list(
    product(
        ["qwen3", "neox", "narrow"],
        ["cp2 ulysses zero2", "cp3 ring zero1", "cp4 ulysses2", "dp2 cp2 ring zero1"],
        KINDS,
    )
)


def made(name: str, **more: Any) -> Any:
    """A random model in fp32, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, values = MODELS[name]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**values, **more}))
    with torch.no_grad():  # norms and biases away from 1 and 0, so that a wrong one shows
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def wide(name: str, **more: Any) -> Any:
    """In fp64, also where transformers casts to fp32 whatever the model's dtype: in RMS norms and in the loss."""
    model = made(name, **more).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_wide_rms_norm, module)
    model.loss_function = _wide_loss
    return model


def _wide_rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def _wide_loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """transformers' own loss, of logits whose .float() leaves them as they are."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits.float = lambda: logits  # type: ignore[method-assign]
    return ForCausalLMLoss(logits, *args, **kwargs)  # type: ignore[no-any-return]


def batches(kind: str, data_ranks: int) -> list[list[dict[str, Tensor]]]:
    """For each data rank two micro-batches, as users of transformers have them."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for data_rank in range(data_ranks):
        mine = []
        for length in (11, 6):
            rows = 1 if kind == "one row" else 3
            tokens = torch.randint(VOCAB, (rows, length), generator=generator)
            place = torch.arange(length).expand(rows, -1)
            labels = tokens.masked_fill(place < 2 * data_rank + torch.arange(rows)[:, None], -100)
            batch = {"input_ids": tokens, "labels": labels}
            if kind == "first labels only":  # of two positions: all but the first cp rank have none
                batch["labels"] = tokens.masked_fill((place > 2) | (data_rank > 0), -100)
            elif kind == "packed":  # documents begin anew at another place in each row
                starts = 3 + torch.arange(rows)[:, None]
                batch["position_ids"] = torch.where(place >= starts, place - starts, place)
            else:
                batch["attention_mask"] = (place < length - torch.arange(rows)[:, None]).long()
                batch["labels"] = labels.masked_fill(batch["attention_mask"] == 0, -100)
            mine.append(batch)
        found.append(mine)
    return found


@lru_cache
def one_device(name: str, kind: str, data_ranks: int) -> dict[str, Tensor]:
    """transformers alone: gradients of the mean over all labels, and parameters after a step of SGD."""
    model = wide(name)
    assert model.config._attn_implementation == "sdpa"
    every = [batch for mine in batches(kind, data_ranks) for batch in mine]
    labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in every)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in every:
        part = model(**batch, num_items_in_batch=torch.tensor(labels), use_cache=False).loss
        part.backward()
        loss = loss + part.detach()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gradients | {f"{n} stepped": p.detach() for n, p in model.named_parameters()} | {"loss": loss}


def steps_of(model: Any, mesh: Mesh, kind: str) -> dict[str, Tensor]:
    """The loop of the page, under cp."""
    if "checkpoint" in kind:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in kind})
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    parts = [shard(batch, mesh) for batch in batches(kind, mesh.size("dp"))[mesh.index("dp")]]
    losses = [model(**part.inputs).loss for part in parts]
    for loss, part in zip(losses, parts, strict=True):
        engine.backward(loss, weight=part.weight)
    found = {n: g.clone() for n, g in engine.grads().items()}
    stats = engine.step()
    stepped = {f"{n} stepped": p.detach().clone() for n, p in model.named_parameters()}
    return (
        found
        | stepped
        | {"loss": torch.tensor(stats.loss, dtype=torch.float64), "weights": torch.stack([p.weight for p in parts])}
    )


def under_cp(name: str, layout: str, kind: str) -> dict[str, Tensor]:
    mesh = Mesh(layout)
    return steps_of(attach(wide(name), mesh), mesh, kind)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, theirs in expected.items():
        assert float((found[name] - theirs).norm()) <= 1e-9 * float(theirs.norm()), name


def prove(worlds: Any, name: str, layout: str, kind: str) -> list[dict[str, Tensor]]:
    sizes = Layout.parse(layout)
    expected = one_device(name, kind, sizes.size("dp"))
    every = worlds(sizes.world_size).run(under_cp, name, layout, kind)
    for found in every:
        close(found, expected)
    return every


@pytest.mark.medium
@pytest.mark.parametrize(("name", "layout"), FAMILIES)
def test_every_family_has_the_gradients_of_one_device(worlds, name: str, layout: str) -> None:
    prove(worlds, name, layout, "plain")


@pytest.mark.parametrize(("name", "layout", "kind"), sized(BATCHES, tuple, lambda case: False))
def test_and_so_it_has_in_every_kind_of_batch(worlds, name: str, layout: str, kind: str) -> None:
    every = prove(worlds, name, layout, kind)
    if kind == "first labels only":
        assert any(not found["weights"].any() for found in every), "some rank should have no label"


def two_models_two_meshes() -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Forwards of both before either goes backward, in one process; then a part of one mesh for the other's model."""
    ring, ulysses = Mesh("cp2 ring"), Mesh("cp2 ulysses")
    first, second = attach(wide("neox"), ring), attach(wide("llama"), ulysses)
    engines = [
        ig.Engine(m, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1)) for m, mesh in ((first, ring), (second, ulysses))
    ]
    for batch in batches("plain", 1)[0]:
        parts = [shard(batch, ring), shard(batch, ulysses)]
        losses = [model(**part.inputs).loss for model, part in zip((first, second), parts, strict=True)]
        for engine, loss, part in zip(engines, losses, parts, strict=True):
            engine.backward(loss, weight=part.weight)
    found = [{n: g.clone() for n, g in engine.grads().items()} for engine in engines]
    return found[0], found[1], refusal(lambda: first(**parts[1].inputs))


def refusal(call: Any) -> str:
    try:
        call()
    except ModelError as error:
        return str(error)
    return "not refused"


def test_two_models_with_two_meshes_do_not_meet(worlds) -> None:
    for first, second, text in worlds(2).run(two_models_two_meshes):
        for found, name in ((first, "neox"), (second, "llama")):
            expected = one_device(name, "plain", 1)
            close(found, {n: expected[n] for n in found})
        assert "IG443" in text
        assert "'cp2 ulysses'; the model is attached to 'cp2 ring'" in text


def calls_that_are_refused() -> list[tuple[str, str]]:
    mesh, (batch, _) = Mesh("cp2 ring"), batches("plain", 1)[0]
    model = attach(wide("mistral"), mesh)
    part, ids = shard(batch, mesh), batch["input_ids"]
    other = {"input_ids": ids.roll(mesh.rank, 0)}
    attached = attach(wide("llama"), mesh)
    return [
        ("IG443", refusal(lambda: model(**batch))),
        ("IG443", refusal(lambda: model.base_model(ids))),
        ("IG443", refusal(lambda: model.generate(ids, max_new_tokens=2, do_sample=False))),
        ("IG443", refusal(lambda: model(**part.inputs, attention_mask=batch["attention_mask"]))),
        (
            "IG443",
            refusal(
                lambda: model(
                    **{**part.inputs, "input_ids": ids},
                )
            ),
        ),
        ("IG442", refusal(lambda: model(**part.inputs, output_attentions=True))),
        ("IG442", refusal(lambda: attach(wide("llama", attention_dropout=0.1), mesh))),
        ("IG414", refusal(lambda: attached(**shard(other, mesh).inputs))),
    ]


def test_calls_that_could_not_be_exact_are_refused(worlds) -> None:
    for found in worlds(2).run(calls_that_are_refused):
        assert [(code, text[: len(code)]) for code, text in found] == [(code, code) for code, _ in found], found


def logits_in_order(layout: str) -> tuple[Tensor, Tensor]:
    mesh, (batch, _) = Mesh(layout), batches("packed", 1)[0]
    part = shard({n: t for n, t in batch.items() if n != "labels"}, mesh)
    model = attach(wide("qwen3").eval(), mesh)
    with torch.no_grad():
        whole = part.gather_sequence(model(**part.inputs).logits)
        return whole, wide("qwen3").eval()(**batch, use_cache=False).logits.clone()


@pytest.mark.parametrize("layout", ["cp2 ring", "cp2 ulysses"])
def test_logits_without_labels_are_those_of_one_device(worlds, layout: str) -> None:
    for found, expected in worlds(2).run(logits_in_order, layout):
        assert float((found - expected).abs().max()) < 1e-12


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "attn_pdrop": 0.0},
    "granite": {**GROUPED, "attention_multiplier": 0.3},
    "gemma2": GROUPED | {"head_dim": 8},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "bert": COMMON,
    "lfm2": GROUPED | {"layer_types": ["conv", "full_attention"]},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2},
    "stablelm": GROUPED,
    "llama": GROUPED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": GROUPED | {"attention_dropout": 0.1},
    "mixtral": GROUPED | {"num_local_experts": 4, "output_router_logits": True},
    "deepseek_v3": COMMON | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                             "topk_group": 1, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8,
                             "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    "llama4_text": GROUPED | {"head_dim": 8, "intermediate_size_mlp": 31, "num_local_experts": 2, "pad_token_id": 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "code", "seen"),
    [
        ("gpt2", None, None),
        ("granite", None, None),
        ("gemma2", None, None),
        ("bloom", "IG441", "0 calls"),
        ("bert", "IG442", "is_causal=False"),
        ("lfm2", "IG441", "1 calls of transformers' attention interface; .* came out at .1, 2, 3."),
        ("mamba", "IG441", "0 calls"),
        ("stablelm", "IG441", "without the part's 'isograd'"),
        ("llama", "IG446", "rope_type 'dynamic'"),
        ("mistral", "IG442", "dropout of attention probabilities=0.1"),
        ("mixtral", "IG442", "output_router_logits=True"),
        ("deepseek_v3", "IG442", "size of value heads=4"),
        ("llama4_text", "IG442", "passed to attention is None"),
    ],
)
def test_a_model_is_tried_out_and_refused_by_what_it_does(family: str, code: str | None, seen: str | None) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL[family])).train()
    own, modes = model.config._attn_implementation, [m.training for m in model.modules()]
    if code is None:
        attach(model, Mesh.unbound("cp2 ring"))
    else:
        with pytest.raises(ModelError, match=f"(?s){code}.*seen: .*{seen}"):
            attach(model, Mesh.unbound("cp2 ring"))
        assert model.config._attn_implementation == own
    assert [m.training for m in model.modules()] == modes


def test_models_whose_positions_or_loss_are_their_own_are_refused() -> None:
    counting = wide("llama")
    rotary = counting.model.rotary_emb.forward
    counting.model.rotary_emb.forward = lambda x, position_ids: rotary(x, torch.arange(x.shape[1])[None])
    shifting = wide("llama")
    shifting.loss_function = lambda logits, labels, vocab_size, **_: torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), reduction="sum"
    )
    balancing = wide("llama")
    balancing.loss_function = lambda logits, **rest: _wide_loss(logits, **rest) + 0.01 * logits.square().mean()
    cases = ((counting, "IG446"), (shifting, "IG447"), (balancing, "IG447"), (torch.nn.Linear(2, 2), "IG441"))
    for model, code in cases:
        with pytest.raises(ModelError, match=code):
            attach(model, Mesh.unbound("cp2 ulysses"))


@pytest.mark.parametrize("layout", ["cp2 tp2", "cp2 pp2"])
def test_a_model_that_is_not_its_configs_class_is_cut_over_cp_only(layout: str) -> None:
    from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

    other = AutoModelForQuestionAnswering.from_config(made("llama").config)
    changed = made("llama")
    changed.model.layers[1] = changed.model.layers[0]
    for model in (other, changed):
        with pytest.raises(ModelError, match=r"IG440(.|\n)*ig.hf.load"):
            attach(model, Mesh.unbound(layout))
    if "pp" in layout:
        with pytest.raises(ModelError, match="IG440"):
            attach(AutoModelForTokenClassification.from_config(other.config), Mesh.unbound(layout))


def test_fewer_heads_than_cp_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match="IG407"):
        attach(wide("llama"), Mesh.unbound("cp8 ulysses"))


def test_a_model_made_from_the_same_config_keeps_its_attention() -> None:
    first, ids = made("llama"), torch.arange(5)[None]
    second = type(first)(first.config)
    attach(first, Mesh.unbound("cp2 ring"))
    assert first.config._attn_implementation == first.model.layers[0].self_attn.config._attn_implementation == "isograd"
    assert second.config._attn_implementation == second.model.layers[0].self_attn.config._attn_implementation == "sdpa"
    assert second(ids).logits.shape == (1, 5, VOCAB)


def test_an_attention_changed_behind_attach_is_refused() -> None:
    mesh = Mesh.unbound("cp2 ring")
    model = attach(made("llama"), mesh)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match=r"(?s)IG443.*another attention than attach gave"):
        model(**shard({"input_ids": torch.arange(8)[None]}, mesh).inputs)


def test_an_attached_model_is_saved_as_it_was_and_gets_its_own_attention_back(tmp_path) -> None:
    model, ids = made("llama").eval(), torch.arange(5)[None]
    before = model.generate(ids, max_new_tokens=3, do_sample=False)
    attach(attach(model, Mesh.unbound("cp2 ring")), Mesh.unbound("cp2 ulysses")).save_pretrained(tmp_path)
    assert "isograd" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    attach(model, Mesh.unbound("dp2"))
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), before)


@pytest.mark.parametrize("layout", ["1", "cp3 ulysses", "cp3 ring", "cp4 ulysses2"])
@pytest.mark.parametrize("length", [1, 11, 12])
def test_every_token_has_its_position_and_the_next_one_as_its_label(layout: str, length: int) -> None:
    """Index-coded: token i of row r is 100 r + i. No target is lost at a border, and none is made up."""
    ids = torch.arange(2)[:, None] * 100 + torch.arange(length)
    seen: list[tuple[int, int]] = []
    for rank in range(Layout.parse(layout).world_size):
        part = shard({"input_ids": ids, "labels": ids}, Mesh.unbound(layout, rank))
        labels = part.inputs["shift_labels"]
        assert int(part.weight) == int((labels != -100).sum())
        for row in range(2):
            for token, place, label in zip(
                *(part.inputs[n][row].tolist() for n in ("input_ids", "position_ids", "shift_labels")), strict=True
            ):
                if label != -100:
                    assert (token, label) == (100 * row + place, token + 1)
                    seen.append((token, label))
    assert sorted(seen) == [(100 * r + i, 100 * r + i + 1) for r in range(2) for i in range(length - 1)]


IDS = torch.arange(8).view(2, 4)


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        ({"input_ids": IDS, "atention_mask": IDS}, "IG444: .*did you mean 'attention_mask'"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, "IG444"),
        ({"labels": IDS}, "IG444"),
        ({"input_ids": IDS[0]}, "IG444"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}, "IG445: padding"),
        ({"input_ids": IDS, "labels": IDS, "attention_mask": torch.tensor([[1, 1, 0, 0]] * 2)}, "IG445: labels"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 4), "position_ids": IDS % 2}, "IG445: position_ids"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: dict[str, Tensor], code: str) -> None:
    with pytest.raises(ModelError, match=code):
        shard(batch, Mesh.unbound("cp2 ring"))


def test_padding_whose_score_would_be_taken_for_its_rows_is_refused() -> None:
    from transformers import AutoConfig

    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    wrong: list[tuple[int | None, dict[str, Tensor]]] = [
        (9, {"input_ids": IDS}), (None, {"input_ids": IDS}), (3, {"inputs_embeds": torch.zeros(2, 4, 6)})
    ]  # fmt: skip
    for pad, given in wrong:
        base = SimpleNamespace(config=AutoConfig.for_model("llama", pad_token_id=pad))
        with pytest.raises(ModelError, match="IG445: padding whose score"):
            RowScores(Mesh.unbound("cp2 ring")).cut(base, (), given | {"attention_mask": mask})
    base = SimpleNamespace(config=AutoConfig.for_model("llama", pad_token_id=3))  # the last token of the first row
    _, part = RowScores(Mesh.unbound("cp2 ring")).cut(base, (IDS, mask), {"use_cache": True})
    assert part["input_ids"].tolist() == [[0, 3], [4, 7]] and not part["use_cache"]


def case(mesh: Mesh) -> ig.prove.Case:
    """For the verifier: sequences with different numbers of labels."""
    tokens = torch.randint(VOCAB, (8, 9), generator=torch.Generator().manual_seed(2))
    labels = tokens.masked_fill(torch.arange(9) < torch.arange(8)[:, None], -100)
    return ig.prove.Case(attach(wide("neox"), mesh), {"input_ids": tokens, "labels": labels}, partial(mean_of, mesh))


def mean_of(mesh: Mesh, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    part = shard(batch, mesh)
    return model(**part.inputs).loss, part.weight


@pytest.mark.medium
@pytest.mark.usefixtures("lent")
def test_the_verifier_proves_an_attached_model() -> None:
    report = ig.verify(case, ["cp2 ring", "cp2 ulysses zero1"])
    assert report.ok, f"\n{report}"
