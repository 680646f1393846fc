"""Models of transformers, cut into stages, have by name the gradients of transformers on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ModelError, PipelineError
from isograd.hf import export_hf, stages
from isograd.hf.build import build
from isograd.hf.dependency_probe import AFTER, BEFORE, EVERYWHERE, probe_dependencies
from isograd.hf.force_fp64 import ForceFP64, in_fp64
from isograd.hf.loading import load
from isograd.hf.losses import CAUSAL, library_of
from isograd.hf.proof import compare
from tests.hf.test_hugging import MICROS, batch, config_of, distance, one_device, sgd

LAYERS = {"num_hidden_layers": 4, "pad_token_id": 1}


def trained(kind: str, layout: str, out: str | None = None) -> list[str]:
    """The names of gradients that are not one device's, on this rank; and the losses, if they differ."""
    config, mesh = config_of(kind, **LAYERS), Mesh(layout)
    with ForceFP64():
        model: Any = build(config, mesh, torch.float64, noise=0.1)
        alone: Any = build(config, Mesh.unbound("1"), torch.float64, noise=0.1)
    engine = Engine(model, mesh, sgd)
    assert engine.pipeline is not None
    engine.pipeline.chunks = {stage: in_fp64(chunk) for stage, chunk in engine.pipeline.chunks.items()}
    expected, after = one_device(config, dict(alone.named_parameters()), mesh.size("dp"))
    wrong = []
    for step, theirs in enumerate(expected):
        batches = [batch(step, mesh.index("dp"), number) for number in range(MICROS)]
        told = engine.evaluate(batches).loss
        engine.accumulate(batches)
        floor = 1e-6 * float(torch.stack([g.norm() for g in theirs.values()]).norm())
        ours = dict(engine.grads().items())
        wrong += [f"grad {n}" for n, g in ours.items() if not distance(g, theirs[n], floor) <= 1e-9]
        if not abs(engine.step().loss - told) < 1e-12:
            wrong.append("the loss of evaluate")
    if out is not None:
        export_hf(engine, out)
    with engine.full_parameters():
        for record in engine.table:
            box = tuple(slice(*ends) for ends in record.contract.local(mesh))
            if not distance(record.parameter.detach(), after[record.name][box], 1e-6) <= 1e-9:
                wrong.append(record.name)
    return wrong


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "layout"), [("qwen3_moe", "pp2 zb"), ("gemma2", "pp2 vpp2 1f1b")])
def test_gradients_and_parameters_are_one_devices(worlds, kind: str, layout: str) -> None:
    assert worlds(2).run(trained, kind, layout) == [[], []]


@pytest.mark.parametrize("layout", ["tp2 pp2 zero1", "dp2 pp2 zero2", "cp2 pp2 ulysses", "cp2 pp2 ring zero1"])
def test_with_other_axes_a_tied_model_is_one_devices(worlds, layout: str) -> None:
    assert worlds(4).run(trained, "qwen2", layout) == [[]] * 4


@pytest.mark.medium
def test_a_model_in_stages_is_written_as_one_folder(worlds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert worlds(2).run(trained, "qwen2", "pp2 1f1b", str(tmp_path / "out")) == [[], []]
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    config = config_of("qwen2", **LAYERS)
    with ForceFP64():
        alone: Any = build(config, Mesh.unbound("1"), torch.float64, noise=0.1)
    _, after = one_device(config, dict(alone.named_parameters()), 1)
    assert type(written).__name__ == "Qwen2ForCausalLM"
    assert all(distance(p.detach(), after[name], 1e-6) <= 1e-9 for name, p in written.named_parameters())


def refused_before_any_stage_runs() -> list[str]:
    """Codes of micro-batches that no stage may run; the next step is the first one's, to the bit."""
    config, mesh = config_of("qwen2", **LAYERS), Mesh("pp2 1f1b")
    engine = Engine(load(config, mesh, prove=False), mesh, sgd)
    good = batch(0, 0, 0)
    engine.accumulate([good])
    before = dict(engine.grads().items())
    engine.discard()
    padded = {**good, "attention_mask": torch.ones_like(good["input_ids"])}
    padded["attention_mask"][0, 0] = 0
    codes = []
    for wrong in ({"input_ids": good["input_ids"]}, padded, tuple(good.values())):
        with pytest.raises(ModelError) as error:
            engine.train_step([good, wrong])
        codes.append(error.value.code)
    engine.accumulate([good])
    codes += [name for name, g in engine.grads().items() if not torch.equal(g, before[name])]
    with pytest.raises(ModelError) as error:
        engine.model.save_pretrained("never")  # type: ignore[operator]
    return [*codes, error.value.code]


def test_a_batch_that_some_stage_could_not_run_is_refused_on_all_and_leaves_nothing(worlds) -> None:
    assert worlds(2).run(refused_before_any_stage_runs) == [["IG444", "IG445", "IG444", "IG475"]] * 2


def without_the_tie() -> list[str]:
    """What the proof says when the copies of a tied embedding are not summed."""
    declare = stages.declare
    stages.declare = lambda *_, **__: None  # type: ignore[assignment]
    try:
        return list(compare(config_of("qwen2"), Mesh("pp2 1f1b")).wrong)
    finally:
        stages.declare = declare


def test_the_proof_names_a_tie_that_is_not_summed(worlds) -> None:
    assert worlds(2).run(without_the_tie) == [["model.embed_tokens.weight"]] * 2


def test_a_survey_says_what_is_needed_where() -> None:
    config = config_of("qwen2")
    found = probe_dependencies(library_of(config, "here")[0], config, CAUSAL)
    assert found.layers == "model.layers"
    assert found.crossing == []
    assert found.roles == {"model.embed_tokens.weight": {BEFORE, AFTER}, "model.norm.weight": {AFTER}}


@pytest.mark.medium
def test_what_layers_are_given_from_elsewhere_is_held_by_every_stage() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3n_text", num_kv_shared_layers=0)
    roles = probe_dependencies(library_of(config, "here")[0], config, CAUSAL).roles
    assert roles["model.embed_tokens_per_layer.weight"] == {BEFORE, EVERYWHERE}


def test_results_of_a_layer_that_are_none_are_not_taken_for_tensors() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("falcon")
    _, leaves = probe_dependencies(library_of(config, "here")[0], config, CAUSAL).output
    assert leaves == [torch.Tensor, None]


def test_each_rank_holds_its_stages_and_no_more() -> None:
    tables = []
    for rank in range(2):
        mesh = Mesh.unbound("pp2 1f1b", rank)
        model: Any = build(config_of("qwen2", **LAYERS), mesh, torch.float32)
        tables.append(contracts(model, mesh))
        with pytest.raises(PipelineError, match="IG808"):
            model(**batch(0, 0, 0))
    first, last = ({r.name: r.contract.partial_over for r in table} for table in tables)
    shared = {"model.embed_tokens.weight": ("pp:0+1",)}
    assert (
        {n: partial_over for n, partial_over in first.items() if partial_over}
        == {n: partial_over for n, partial_over in last.items() if partial_over}
        == shared
    )
    assert first.keys() & last.keys() == shared.keys()
    assert "model.norm.weight" in last
    assert len(first) + len(last) - 1 == len(
        list(build(config_of("qwen2", **LAYERS), Mesh.unbound("1"), torch.float32).parameters())
    )


def test_layers_that_need_more_than_the_layer_before_are_refused() -> None:
    from transformers import AutoConfig

    mesh = Mesh.unbound("pp2 1f1b")
    with pytest.raises(ModelError, match="num_kv_shared_layers") as caught:
        stages.refuse_shared_keys(AutoConfig.for_model("gemma3n_text"), mesh)
    assert caught.value.code == "IG471"
    routed = config_of("qwen3_moe", output_router_logits=True)
    with pytest.raises(ModelError, match="the loss depends on parameters of layer") as caught:
        build(routed, mesh, torch.float32)
    assert caught.value.code == "IG471"
