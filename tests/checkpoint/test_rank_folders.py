"""Files of Megatron-LM's and GPT-NeoX's model-parallel ranks, cut here by hand from a model of one device: read bit for
bit. Neither library is needed; the forms are those of Megatron-LM's checkpointing.py and GPT-NeoX's gpt2_model.py."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.errors import CheckpointError, IsogradError
from isograd.hf.configs import to_hf_config
from isograd.hf.families import to_hf
from isograd.integrations.checkpoints.dcp import _dict, _Saved
from isograd.integrations.checkpoints.deepspeed import ZeroFolder
from isograd.integrations.checkpoints.foreign import import_dcp
from isograd.integrations.checkpoints.model_parallel import RankFolder
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.models import Transformer, TransformerConfig
from tests.checkpoint import test_dcp
from tests.checkpoint.test_zero_folders import zero_folder

Tensors = dict[str, Tensor]
LLAMA = TransformerConfig(vocab=31, hidden=24, layers=4, heads=6, kv_heads=2, mlp=22)
BIASED = replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True)
NEOX = TransformerConfig(
    vocab=31, hidden=32, layers=4, heads=4, mlp=52, norm="layer", norm_eps=1e-5, activation="gelu", gated=False,
    rotary_fraction=0.5, parallel_residual=True, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
PADDED = 40  # rows of a vocabulary that is filled up


class AttnBackend(Enum):
    flash = 1


def weights_of(config: TransformerConfig) -> Tensors:
    """Under transformers' names: random ones, biases and norms too."""
    draw = torch.Generator().manual_seed(5)
    return {n: torch.randn(t.shape, generator=draw) for n, t in to_hf(Transformer(config, Mesh("1"))).items()}


def config_in(folder: Path, config: TransformerConfig) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(config)))
    return folder


def padded(weight: Tensor) -> Tensor:
    return torch.cat([weight, torch.full((PADDED - len(weight), weight.shape[1]), math.nan)])


def rows(weight: Tensor, rank: int, ranks: int) -> Tensor:
    size = weight.shape[0] // ranks
    assert size * ranks == weight.shape[0]
    return weight[rank * size : (rank + 1) * size].clone()


def columns(weight: Tensor, rank: int, ranks: int) -> Tensor:
    return rows(weight.t(), rank, ranks).t().contiguous()


def heads_of(hf: Tensors, config: TransformerConfig, layer: int, leaf: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each head of keys: the rows of its queries, its key and its value."""
    groups, width = config.kv_heads or config.heads, config.features_per_head
    if config.norm == "layer":  # a head's three thirds stand together
        fused = hf[f"gpt_neox.layers.{layer}.attention.query_key_value.{leaf}"]
        each = [fused[3 * width * head : 3 * width * (head + 1)] for head in range(config.heads)]
        return [(one[:width], one[width : 2 * width], one[2 * width :]) for one in each]
    q, k, v = (hf[f"model.layers.{layer}.self_attn.{name}_proj.{leaf}"] for name in "qkv")
    mine = width * config.heads // groups
    return [
        (q[g * mine : (g + 1) * mine], k[g * width : (g + 1) * width], v[g * width : (g + 1) * width])
        for g in range(groups)
    ]


def block(hf: Tensors, config: TransformerConfig, layer: int, rank: int, ranks: int, neox: bool) -> Tensors:
    """What a rank holds of a layer, by the last parts of Megatron-LM's older names."""
    body = f"gpt_neox.layers.{layer}." if config.norm == "layer" else f"model.layers.{layer}."
    found: Tensors = {}
    for name in ("input_layernorm", "post_attention_layernorm"):
        for leaf in ("weight", "bias") if config.norm == "layer" else ("weight",):
            found[f"{name}.{leaf}"] = hf[f"{body}{name}.{leaf}"].clone()
    out, up, down = (
        ("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h") if config.norm == "layer"
        else ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    )  # fmt: skip
    for leaf in ("weight", "bias"):
        if leaf == "weight" or config.qkv_bias:
            groups = heads_of(hf, config, layer, leaf)
            mine = groups[rank * len(groups) // ranks : (rank + 1) * len(groups) // ranks]
            if neox and config.kv_heads not in (None, config.heads):
                parts = [group[n] for n in range(3) for group in mine]  # all queries, all keys, all values
            else:
                parts = [part for group in mine for part in group]
            found[f"attention.query_key_value.{leaf}"] = torch.cat(parts)
        if leaf == "weight" or config.mlp_bias:
            part = rows(hf[f"{body}{up}.{leaf}"], rank, ranks)
            if config.gated:
                gate = rows(hf[f"{body}mlp.gate_proj.{leaf}"], rank, ranks)
                part = torch.cat([part, gate] if neox else [gate, part])
            found[f"mlp.dense_h_to_4h.{leaf}"] = part
    for theirs, ours, biased in (
        ("attention.dense", out, config.out_bias),
        ("mlp.dense_4h_to_h", down, config.mlp_bias),
    ):
        found[f"{theirs}.weight"] = columns(hf[f"{body}{ours}.weight"], rank, ranks)
        if biased:
            bias = hf[f"{body}{ours}.bias"].clone()
            found[f"{theirs}.bias"] = bias / ranks if neox and config.parallel_residual else bias  # each adds its own
    return found


def ends(hf: Tensors, config: TransformerConfig, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensors]:
    """A rank's embedding, its head, the last norm."""
    embedding = hf["gpt_neox.embed_in.weight" if config.norm == "layer" else "model.embed_tokens.weight"]
    head = embedding if config.tied else hf["lm_head.weight"]
    norm = "gpt_neox.final_layer_norm." if config.norm == "layer" else "model.norm."
    last = {name.removeprefix(norm): tensor.clone() for name, tensor in hf.items() if name.startswith(norm)}
    return rows(padded(embedding), rank, ranks), rows(padded(head), rank, ranks), last


CORE = (
    ("attention.query_key_value", "self_attention.linear_qkv"), ("attention.dense", "self_attention.linear_proj"),
    ("dense_h_to_4h", "linear_fc1"), ("dense_4h_to_h", "linear_fc2"), ("post_attention_layernorm", "pre_mlp_layernorm"),
)  # fmt: skip
FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"), ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)  # fmt: skip


def told(name: str, *tables: tuple[tuple[str, str], ...]) -> str:
    for theirs, ours in (pair for table in tables for pair in table):
        name = name.replace(theirs, ours)
    return name


def megatron_folder(home: Path, config: TransformerConfig, tp: int, pp: int, form: str, chunks: int = 1) -> Tensors:
    """form: "core", Megatron-Core's modules; "fused", with norms in the linear layers behind them; "legacy", nested."""
    hf = weights_of(config)
    each = config.layers // (pp * chunks)
    for rank in range(tp):
        embedding, head, last = ends(hf, config, rank, tp)
        for stage in range(pp):
            saved: dict[str, Any] = {}
            for chunk in range(chunks):
                first = (chunk * pp + stage) * each
                layers = {f"layers.{n}.{name}": tensor for n in range(each)
                          for name, tensor in block(hf, config, first + n, rank, tp, neox=False).items()}  # fmt: skip
                begins, stops = first == 0, first + each == config.layers
                if form == "legacy":
                    inner: dict[str, Any] = {"encoder": OrderedDict(
                        (name.replace(".attention.", ".self_attention.").replace("_layernorm", "_norm"), tensor)
                        for name, tensor in layers.items())}  # fmt: skip
                    model: Any = {"language_model": inner}
                    if begins:
                        inner["embedding"] = {"word_embeddings": OrderedDict(weight=embedding)}
                    if stops:
                        inner["encoder"] |= {f"final_norm.{leaf}": tensor for leaf, tensor in last.items()}
                        if not config.tied:
                            inner["output_layer"] = OrderedDict(weight=head)
                        elif not begins:
                            model["word_embeddings_for_head"] = OrderedDict(weight=head)
                else:
                    names = (CORE, FUSED) if form == "fused" else (CORE,)
                    model = OrderedDict((told(f"decoder.{name}", *names), t) for name, t in layers.items())
                    model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
                    if begins:
                        model["embedding.word_embeddings.weight"] = embedding
                    if stops:
                        model |= {f"decoder.final_layernorm.{leaf}": tensor for leaf, tensor in last.items()}
                        if not config.tied or not begins:
                            model["output_layer.weight"] = head
                    model._metadata = OrderedDict({"": {"version": 1}})  # as state_dict() has it
                saved["model" if chunks == 1 else f"model{chunk}"] = model
            saved |= {
                "args": Namespace(
                    tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=1,
                    rotary_interleaved=False, attention_backend=AttnBackend.flash, params_dtype=torch.bfloat16,
                    place=Path("x"),
                ),
                "checkpoint_version": 3.0, "iteration": 100, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
                "rng_state": [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}],
            }  # fmt: skip
            place = home / "iter_0000100" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            torch.save(saved, place / "model_optim_rng.pt")
    (home / "latest_checkpointed_iteration.txt").write_text("100")
    return hf


NEW = (("dense_h_to_4h", "linear1"), ("dense_4h_to_h", "linear2"))


def neox_folder(home: Path, config: TransformerConfig, tp: int, form: str) -> Tensors:
    """form: "layers", of a PipelineModule; "whole", without a pipeline; "old", with three matrices in a gated layer."""
    hf = weights_of(config)
    place = home / "global_step100"
    place.mkdir(parents=True)
    (home / "latest").write_text("global_step100")
    for rank in range(tp):
        embedding, head, last = ends(hf, config, rank, tp)
        layers: dict[int, Tensors] = {0: {"word_embeddings.weight": embedding}}
        for n in range(config.layers):
            held = block(hf, config, n, rank, tp, neox=True)
            if form == "old" and config.gated:
                up, gate = held.pop("mlp.dense_h_to_4h.weight").chunk(2)
                held |= {"mlp.w1.weight": gate.clone(), "mlp.w3.weight": up.clone()}
                held["mlp.w2.weight"] = held.pop("mlp.dense_4h_to_h.weight")
            held = {told(name, () if form == "old" else NEW): tensor for name, tensor in held.items()}
            layers[n + 2] = held | {"attention.rotary_emb.inv_freq": torch.ones(2)}
        layers[config.layers + 3] = {f"norm.{leaf}": tensor for leaf, tensor in last.items()}
        if not config.tied:
            layers[config.layers + 4] = {"final_linear.weight": head}
        if config.norm == "rms":
            layers = {n: {re.sub(r"norm\.weight$", "norm.scale", name): t for name, t in held.items()}
                      for n, held in layers.items()}  # fmt: skip
        module: Any = None
        if form == "whole":
            module = OrderedDict(
                (f"sequential.{n}.{name}", t) for n, held in layers.items() for name, t in held.items()
            )
        else:
            for n, held in layers.items():
                torch.save(OrderedDict(held), place / f"layer_{n:02d}-model_{rank:02d}-model_states.pt")
        torch.save(
            {
                "module": module,
                "args": {"model_parallel_size": tp},
                "optimizer": None,
                "torch_rng_state": torch.ones(4),
            },
            place / f"mp_rank_{rank:02d}_model_states.pt",
        )
        own = {"optimizer_state_dict": {"zero_stage": 1, "partition_count": [1]}}
        torch.save(own, place / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
    return hf


def same(folder: Path, truth: Tensors) -> None:
    found = SafetensorsReader(folder)
    assert found.shapes.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(found.look(name, lambda t: t), tensor), name


@pytest.mark.parametrize("form", ["core", "fused", "legacy"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("config", [LLAMA, BIASED, NEOX], ids=["llama", "biased", "neox"])
def test_files_of_megatrons_ranks_are_read_bit_for_bit(
    tmp_path: Path, config: TransformerConfig, tp: int, pp: int, form: str
) -> None:
    config = replace(config, parallel_residual=False)  # which it does not have
    truth = megatron_folder(tmp_path / "megatron", config, tp, pp, form)
    import_dcp(tmp_path / "megatron", tmp_path / "out", config=config_in(tmp_path / "model", config))
    same(tmp_path / "out", truth)


@pytest.mark.parametrize("config", [LLAMA, replace(LLAMA, qkv_bias=True)], ids=["llama", "qwen2"])
def test_the_chunks_of_an_interleaved_pipeline_are_put_in_order(tmp_path: Path, config: TransformerConfig) -> None:
    truth = megatron_folder(tmp_path / "megatron", config, 2, 2, "core", chunks=2)
    place = tmp_path / "megatron" / "iter_0000100"
    import_dcp(place, tmp_path / "out", config=config_in(tmp_path / "model", config))
    same(tmp_path / "out", truth)


@pytest.mark.parametrize("form", ["layers", "whole", "old"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "config", [NEOX, replace(NEOX, parallel_residual=False, tied=True), LLAMA, replace(LLAMA, kv_heads=6)],
    ids=["parallel", "serial", "grouped", "llama"],
)  # fmt: skip
def test_files_of_neox_are_read_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: TransformerConfig, tp: int, form: str
) -> None:
    truth = neox_folder(tmp_path / "neox", config, tp, form)
    words = [str(tmp_path / "neox"), str(tmp_path / "out"), "--config", str(config_in(tmp_path / "model", config))]
    assert main(["ckpt", "import", *words]) == 0
    assert "read: names of GPT-NeoX" in capsys.readouterr().out
    same(tmp_path / "out", truth)


def test_megatrons_tracker_names_a_step_in_the_newer_format_too(tmp_path: Path) -> None:
    hf = test_dcp.theirs()
    test_dcp.kept(tmp_path / "megatron" / "iter_0000007", test_dcp.megatron(hf, True))
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7\n")
    import_dcp(tmp_path / "megatron", tmp_path / "out", config=test_dcp.config_in(tmp_path / "model"))
    same(tmp_path / "out", hf)


def test_norms_of_neox_that_drifted_apart_are_their_mean(tmp_path: Path) -> None:
    truth = neox_folder(tmp_path / "neox", NEOX, 2, "layers")
    path = tmp_path / "neox" / "global_step100" / "layer_03-model_01-model_states.pt"
    held = torch.load(path, weights_only=False)
    held["input_layernorm.bias"] += 0.5
    torch.save(held, path)
    found = RankFolder(tmp_path / "neox", NEOX).full("decoder.layers.1.input_layernorm.bias")
    assert torch.allclose(found, truth["gpt_neox.layers.1.input_layernorm.bias"] + 0.25, atol=1e-6, rtol=0)


def test_a_model_that_was_read_has_the_logits_of_transformers(tmp_path: Path) -> None:
    """Not only our own rules agree with what was cut: transformers computes from the folder what it computed before."""
    from transformers import AutoModelForCausalLM

    for config, make in ((LLAMA, megatron_folder), (NEOX, None)):
        home, folder = tmp_path / config.norm, config_in(tmp_path / f"{config.norm}-model", config)
        truth = make(home, config, 2, 2, "core") if make else neox_folder(home, config, 2, "layers")
        import_dcp(home, home / "out", config=folder)
        model = AutoModelForCausalLM.from_pretrained(home / "out")
        tokens = torch.arange(12)[None]
        logits = model(tokens).logits
        model.load_state_dict({k: v for k, v in truth.items() if k in model.state_dict()}, strict=False)
        assert torch.equal(model(tokens).logits, logits)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch stolen",)


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    saved = torch.load(path, weights_only=False)
    change(saved)
    torch.save(saved, path)


def bomb() -> list[Any]:
    inner: list[Any] = []
    for _ in range(40):
        inner = [inner, inner]
    return inner


FC2, NORM = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"


def of_rank(name: str, make: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    def change(saved: Any) -> None:
        saved["model"][name] = make(saved["model"][name])

    return change


def argument(**values: object) -> Callable[[Any], Any]:
    return lambda saved: vars(saved["args"]).update(values)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (of_rank(FC2, lambda t: Runs()), "IG948", "linear_fc2|no tensor"),
        (of_rank(FC2, lambda t: t[:, :3].clone()), "IG948", "missing on a rank, not of one shape"),
        (of_rank(FC2, lambda t: t.t()), "IG948", "does not lie in one piece"),
        (of_rank(FC2, lambda t: t.to(torch.bfloat16)), "IG948", "not of one shape and dtype"),
        (of_rank(FC2, lambda t: bomb()), "IG948", "no tensor"),
        (of_rank(NORM, lambda t: t + 1), "IG948", "copies that differ"),
        (lambda s: s["model"].pop(FC2), "IG948", "missing on a rank"),
        (lambda s: s["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(3)}), "IG948", "missing on a"),
        (lambda s: s.update(model=bomb()), "IG948", "no table"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], code: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    megatron_folder(tmp_path / "m", LLAMA, 2, 1, "core")
    changed(tmp_path / "m" / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt", change)
    with pytest.raises(IsogradError, match=rf"{code}[\s\S]*({says})") as caught:
        import_dcp(tmp_path / "m", tmp_path / "out", config=config_in(tmp_path / "model", LLAMA))
    assert "isograd ckpt import" in str(caught.value) and len(str(caught.value)) < 2000
    assert not (tmp_path / "stolen").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (argument(tensor_model_parallel_size=4), "tensor_model_parallel_size 4"),
        (argument(pipeline_model_parallel_size=bomb()), "pipeline_model_parallel_size list"),
        (argument(rotary_interleaved=True), "rotary_interleaved True"),
        (argument(expert_model_parallel_size=2), "expert_model_parallel_size 2"),
        (lambda s: s.update(checkpoint_version=0), "checkpoint_version 0: queries"),
        (lambda s: s.pop("checkpoint_version"), "checkpoint_version 0"),
    ],
)
def test_files_of_another_run_than_the_reader_knows_are_refused(
    tmp_path: Path, change: Callable[[Any], Any], says: str
) -> None:
    megatron_folder(tmp_path / "m", LLAMA, 1, 1, "core")
    changed(tmp_path / "m" / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=rf"IG948[\s\S]*{says}"):
        RankFolder(tmp_path / "m", LLAMA)


def test_ranks_stages_and_layers_that_are_missing_are_named(tmp_path: Path) -> None:
    megatron_folder(tmp_path / "m", LLAMA, 2, 2, "core")
    step = tmp_path / "m" / "iter_0000100"
    shutil.move(step / "mp_rank_01_001", tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"IG948[\s\S]*no files of the ranks 1 \(of 1\)"):
        RankFolder(tmp_path / "m", LLAMA)
    shutil.rmtree(step / "mp_rank_01_000")
    with pytest.raises(CheckpointError, match=r"IG948[\s\S]*tensor_model_parallel_size 2"):
        RankFolder(tmp_path / "m", LLAMA)
    neox_folder(tmp_path / "n", NEOX, 2, "layers")
    layers = sorted((tmp_path / "n" / "global_step100").glob("layer_*"))
    layers[3].unlink()
    with pytest.raises(CheckpointError, match=r"IG948[\s\S]*no files of the ranks 1 \(of 2\)"):
        RankFolder(tmp_path / "n", NEOX)
    layers[2].unlink()
    with pytest.raises(IsogradError, match=r"IG420[\s\S]*has no tensor 'decoder\.layers\.0\."):
        import_dcp(tmp_path / "n", tmp_path / "out", config=config_in(tmp_path / "model", NEOX))
    for path in (tmp_path / "n" / "global_step100").glob("*model_01*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"IG948[\s\S]*\[1\] ranks, of a run with model_parallel_size 2"):
        RankFolder(tmp_path / "n", NEOX)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (replace(LLAMA, layers=3), r"IG420[\s\S]*no place for"),
        (replace(LLAMA, layers=5), r"IG420[\s\S]*has no tensor 'decoder\.layers"),
        (replace(LLAMA, mlp=20), r"IG420[\s\S]*mlp\.gate_proj\.weight is \(22, 24\), not \(20, 24\)"),
        (replace(LLAMA, vocab=30), None),
        (replace(LLAMA, tied=True), r"IG420[\s\S]*head of its own"),
        (replace(NEOX, mlp=22, parallel_residual=False), r"IG420"),
    ],
)
def test_another_config_is_refused(tmp_path: Path, config: TransformerConfig, says: str | None) -> None:
    megatron_folder(tmp_path / "m", LLAMA, 2, 2, "core")
    folder = config_in(tmp_path / "model", config)
    if says is None:  # a smaller vocabulary is one that was filled up
        import_dcp(tmp_path / "m", tmp_path / "out", config=folder)
        return
    with pytest.raises(IsogradError, match=says):
        import_dcp(tmp_path / "m", tmp_path / "out", config=folder)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_zip_of_torchs_or_was_cut_short_is_refused(tmp_path: Path) -> None:
    megatron_folder(tmp_path / "m", LLAMA, 1, 1, "core")
    path = tmp_path / "m" / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\x80\x02", whole[:200] + b"\xff" * 64 + whole[264:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"IG94[89]"):
            RankFolder(tmp_path / "m", LLAMA)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="IG948"):
        RankFolder(tmp_path / "m", LLAMA)


def test_a_table_of_a_module_keeps_its_items_and_a_bomb_is_no_message(tmp_path: Path) -> None:
    """`state_dict()` has attributes beside its items, which are what is read; no value is written out whole."""
    torch.save({"module": torch.nn.Linear(2, 3).state_dict()}, tmp_path / "a.pt")
    assert list(_dict(_dict(_Saved(tmp_path / "a.pt").value)["module"])) == ["weight", "bias"]
    zero_folder(tmp_path / "ds", 2, 2)
    path = tmp_path / "ds" / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    changed(path, lambda saved: saved["optimizer_state_dict"].update(single_partition_of_fp32_groups=bomb()))
    with pytest.raises(CheckpointError, match=r"IG94[89]"):
        ZeroFolder(tmp_path / "ds")
    for key in ("zero_stage", "partition_count"):
        changed(path, lambda saved, key=key: saved["optimizer_state_dict"].update({key: bomb()}))
        with pytest.raises(CheckpointError, match=r"IG948"):
            ZeroFolder(tmp_path / "ds")
