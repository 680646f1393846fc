"""What a model with experts counts, refuses and reads: buffers change when a step is committed; errors name places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.engine import DataParallel, Engine
from isograd.errors import ConfigError, EngineError, ModelError
from isograd.hf.configs import from_hf_config, to_hf_config
from isograd.hf.families import HuggingFace, to_hf
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions, MoE
from isograd.train.run.peers import expert_load

OPTIONS = ExpertOptions(number=4, per_token=2, width=6, choice_bias=True, choice_bias_rate=0.01, balance="lagged")
CONFIG = TransformerConfig(vocab=31, hidden=12, layers=2, heads=2, mlp=8, experts=OPTIONS)
Batch = tuple[Tensor, Tensor]


def batch(seed: int = 0, rows: int = 3) -> Batch:
    window = torch.randint(31, (rows, 8), generator=torch.Generator().manual_seed(seed))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def engine_of(config: TransformerConfig = CONFIG, layout: str = "1") -> Engine:
    mesh = Mesh(layout)
    model = Transformer(config, mesh, dtype=torch.float64)
    return Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))


def buffers(engine: Engine) -> list[Tensor]:
    return [buffer.clone() for buffer in engine.model.buffers()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_bias_and_lagged_counts_change_at_the_commit_of_a_step_and_never_else() -> None:
    engine, undisturbed = engine_of(), engine_of()
    start = buffers(engine)
    engine.evaluate(batch(1))
    with torch.no_grad():
        engine.model(*batch(1))
    engine.accumulate(batch(1))
    engine.discard()
    for parameter in engine.model.parameters():  # a step that is skipped
        parameter.register_hook(lambda gradient: gradient * torch.inf)
        break
    assert engine.train_step(batch(1)).skipped
    assert same(buffers(engine), start)
    next(engine.model.parameters())._backward_hooks.clear()
    engine.train_step(batch(2))
    undisturbed.train_step(batch(2))
    assert not same(buffers(engine), start)
    assert same(buffers(engine), buffers(undisturbed))
    counts = engine.model.blocks[0].mlp.counts_before
    assert int(counts.sum()) == 3 * 7 * 2  # each of 21 tokens has chosen two, once


def test_a_forward_without_a_backward_counts_nothing() -> None:
    """One whose loss is only looked at, and one that an exception ends after its first layer of experts."""
    engine, undisturbed = engine_of(), engine_of()
    engine.model(*batch(1))
    last = engine.model.blocks[-1].mlp
    hook = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.model(*batch(1))
    hook.remove()
    engine.train_step(batch(2))
    undisturbed.train_step(batch(2))
    for ours, theirs in zip(engine.model.blocks, undisturbed.model.blocks, strict=True):
        assert torch.equal(ours.mlp.load.last, theirs.mlp.load.last)
    assert same(buffers(engine), buffers(undisturbed))


def test_experts_in_no_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"IG601(.|\n)*no layer has experts: every 5 after the first 0 of 2"):
        replace(CONFIG, experts=replace(OPTIONS, every=5))


def test_a_recomputed_step_counts_once_and_chooses_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router whose second forward would choose otherwise: its scores are another function each time."""
    engine, plain = engine_of(), engine_of()
    engine.model.recompute = True
    chosen = []
    route = MoE._route

    def watched(layer: MoE, *args: object) -> object:
        found = route(layer, *args)
        chosen.append(found.indices)
        return found

    monkeypatch.setattr(MoE, "_route", watched)
    engine.train_step(batch())
    assert len(chosen) == 2  # one for each layer: none in backward
    plain.train_step(batch())
    assert same(buffers(engine), buffers(plain))
    for ours, theirs in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_balance_of_a_batch_by_hand_needs_its_counts() -> None:
    config = replace(CONFIG, experts=replace(OPTIONS, balance="batch"))
    engine, whole = engine_of(config), engine_of(config)
    with pytest.raises(ModelError, match=r"IG454(.|\n)*engine.count"):
        engine.model(*batch())
    micros = [batch(1), batch(2, rows=1)]
    engine.count(micros)
    engine.begin(lm=21 + 7, balance=21 + 7)
    for micro in micros:
        engine.backward(engine.model(*micro))
    by_hand = dict(engine.grads().items())
    whole.accumulate(micros)
    for name, gradient in whole.grads().items():
        assert float((by_hand[name] - gradient).norm()) <= 1e-12 * float(gradient.norm()), name


def test_terms_are_returned_in_training_and_a_plain_loss_elsewhere() -> None:
    model = Transformer(CONFIG, Mesh("1"))
    found = model(*batch())
    assert isinstance(found, Terms)
    assert {name: float(term.weight) for name, term in found.items()} == model.term_weights(*batch())
    with torch.no_grad():
        assert isinstance(model(*batch()), tuple)
    assert isinstance(model.eval()(*batch()), tuple)
    silent = replace(CONFIG, experts=replace(OPTIONS, balance="none"))
    assert isinstance(Transformer(silent, Mesh("1"))(*batch()), tuple)


def poisoned() -> str:
    engine = engine_of(layout="dp2 ep2")
    with torch.no_grad():
        if engine.mesh.rank == 1:
            engine.model.blocks[1].mlp.router.weight[0, 0] = torch.nan
    before = [p.detach().clone() for p in engine.model.parameters()]
    with pytest.raises(ModelError) as error:
        engine.train_step(batch(engine.mesh.rank))
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, engine.model.parameters(), strict=True))
    assert engine.step_state.empty
    return str(error.value)


def test_scores_that_are_nan_are_refused_on_all_ranks_with_the_layer_and_the_rank(worlds) -> None:
    for text in worlds(2).run(poisoned):
        assert "IG455" in text
        assert "rank 1 (dp1 ep1): 21 tokens in blocks.1.mlp" in text
        assert "rank 0 (" not in text.split("where:")[0]


def no_rows(layout: str) -> dict[str, Tensor]:
    """The second data rank has no sequence at all."""
    engine = engine_of(layout=layout)
    tokens, labels = batch()
    rows = slice(0, 3) if engine.mesh.index("dp") == 0 else slice(3, 3)
    engine.accumulate([(tokens[rows], labels[rows])])
    return {name: gradient.clone() for name, gradient in engine.grads().items()}


def test_a_data_rank_without_any_sequence_takes_part(worlds) -> None:
    truth = no_rows("1")
    for found in worlds(2).run(no_rows, "dp2 ep2"):
        for name, gradient in truth.items():
            assert float((found[name] - gradient).norm()) <= 1e-12 * max(1.0, float(gradient.norm())), name


def test_data_parallel_refuses_experts_by_name() -> None:
    with pytest.raises(EngineError, match=r"IG569(.|\n)*2 layers that count"):
        DataParallel(Transformer(CONFIG, Mesh("1")))


def test_weights_with_another_number_of_experts_are_refused_by_name() -> None:
    plain = ExpertOptions(number=4, per_token=2, width=6)
    state = to_hf(Transformer(replace(CONFIG, experts=plain), Mesh.unbound("1")))
    with pytest.raises(ModelError, match=r"IG420(.|\n)*4 experts are stored, the config has 8"):
        HuggingFace(state, replace(CONFIG, experts=replace(plain, number=8)))


def test_experts_that_no_family_has_are_not_exported_and_odd_configs_are_not_read() -> None:
    with pytest.raises(ConfigError, match=r"IG616(.|\n)*choice_bias True"):
        to_hf_config(CONFIG)
    plain = replace(CONFIG, experts=ExpertOptions(number=4, per_token=2, width=6))
    with pytest.raises(ConfigError, match=r"IG616(.|\n)*qk_norm False"):
        to_hf_config(plain)
    exported = to_hf_config(replace(plain, qk_norm=True))
    with pytest.raises(ConfigError, match="IG615"):
        from_hf_config({**exported, "mlp_only_layers": [1]})


def test_a_config_of_a_file_has_experts_and_names_a_wrong_key_of_theirs() -> None:
    values = {"vocab": 31, "hidden": 12, "layers": 2, "heads": 2, "mlp": 8}
    found = TransformerConfig.from_dict({**values, "experts": {"number": 4, "per_token": 2, "width": 6}})
    assert found.experts == ExpertOptions(number=4, per_token=2, width=6)
    for wrong, words in (({"numbr": 4}, "did you mean 'number'"), ({"number": "4"}, "number is of type int")):
        with pytest.raises(ConfigError, match=words):
            TransformerConfig.from_dict({**values, "experts": {"number": 4, "per_token": 2, "width": 6, **wrong}})


def test_the_log_shows_the_load_of_experts() -> None:
    engine = engine_of()
    assert expert_load(engine.model, engine.mesh) == {}
    engine.train_step(batch())
    load = expert_load(engine.model, engine.mesh)
    assert list(load) == ["blocks.0.mlp", "blocks.1.mlp"]
    for layer in load.values():
        assert abs(sum(layer) - 4) < 0.01
