"""QLoRA: adapters over weights of 4 and 8 bits have the gradients of plain torch over the unpacked weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import isograd as ig
from isograd.checkpoint.read import Reader
from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf import export_adapters
from isograd.hf.quantized import NF4, pack, unpack
from isograd.train import journal, loop, resources, texts
from isograd.train.config import Config
from isograd.train.tasks import make_task
from tests.train.test_library import LORA, QUIET, base, config_of, expected, is_equal, peft, plain, under, written


def nearest(weight: Tensor, bits: int) -> Tensor:
    """A matrix in so many bits, by the definition: of each element the nearest value that can be stored."""
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64) if bits == 4 else weight
    values = NF4 if bits == 4 else torch.arange(-127.0, 128.0)
    unit = blocks.abs().amax(dim=1, keepdim=True) / values[-1]
    found = values[((blocks / unit)[..., None] - values).abs().argmin(dim=-1)] * unit
    return found.flatten()[: weight.numel()].view_as(weight)


def unpacked(folder: Path, bits: int) -> Path:
    """A copy of the base whose adapted matrices are those of so many bits."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in LORA["targets"] and parameter.dim() == 2:
                whole = nearest(parameter.float(), bits)
                assert 1e-3 < (whole - parameter).norm() / parameter.norm() < 0.2
                parameter.copy_(whole)
    model.save_pretrained(folder / f"whole-{bits}")
    return folder / f"whole-{bits}"


def over(config: Config, path: Path) -> Config:
    """The same adapters over the model of another folder."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})


@pytest.mark.peers
@pytest.mark.parametrize("bits", [4, 8])
def test_a_matrix_is_packed_as_its_definition_says_and_as_bitsandbytes_does(bits: int) -> None:
    weight = torch.randn(37, 22, generator=torch.Generator().manual_seed(bits))
    packed, scales = pack(weight, bits)
    found = unpack(packed, scales, weight.shape)
    torch.testing.assert_close(found, nearest(weight, bits), rtol=1e-6, atol=0)
    weight[:20] = 0  # blocks and rows without any number
    assert not unpack(*pack(weight, bits), weight.shape)[:20].any()
    theirs: Any = pytest.importorskip("bitsandbytes.functional")
    weight[:20] = 1
    packed, scales = pack(weight, bits)
    if bits == 4:
        rows, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
        assert torch.equal(packed.flatten()[: len(rows)], rows.flatten()) and torch.equal(scales[:, 0], state.absmax)
        whole = theirs.dequantize_4bit(rows, state)
    else:
        rows, largest, _ = theirs.int8_vectorwise_quant(weight)
        assert torch.equal(packed, rows) and torch.equal(scales[:, 0], largest)
        whole = theirs.int8_vectorwise_dequant(rows, largest)
    torch.testing.assert_close(unpack(packed, scales, weight.shape), whole, rtol=1e-6, atol=0)


@pytest.mark.medium
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_have_the_gradients_of_the_unpacked_model_under_every_layout(
    worlds, tmp_path: Path, bits: int
) -> None:
    base(tmp_path)
    config = config_of(tmp_path / "run", "chat", adapter={**LORA, "base_bits": bits})
    config.folder.mkdir()
    texts.prepare(config)
    export_adapters(make_task(config, Mesh("dp1"), lambda _: None).engine, tmp_path / "start")
    truth, _ = expected(over(config, unpacked(tmp_path, bits)), tmp_path / "start")
    assert all(gradient.abs().max() > 0 for gradient in truth[-1][1].values())
    is_equal(under([config])[0][0], truth, "dp1")
    layouts = ["dp2 zero1", "dp2 zero3", "cp2 ring", "pp2"]
    both = worlds(2).run(under, [config.model_copy(update={"layout": each}) for each in layouts], timeout=280)
    for number, layout in enumerate(layouts):
        first, second = (each[number][0] for each in both)
        parts = zip(first, second if layout == "pp2" else first, strict=True)  # a stage has its own layers
        is_equal([(a[0], a[1] | b[1]) for a, b in parts], truth, layout)


@pytest.mark.medium
def test_a_run_resumes_under_another_layout_with_its_packed_weights_and_is_exported(worlds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base(tmp_path)
    whole, cut = (config_of(tmp_path / name, "chat", adapter={**LORA, "base_bits": 4}) for name in ("whole", "cut"))
    assert loop.run(whole, QUIET).code == 0
    assert loop.run(cut, replace(QUIET, until=1)).code == 75
    assert worlds(2).run(loop.run, cut.model_copy(update={"layout": "dp2 zero3"}), QUIET)[0].code == 0
    logged = [[x["loss"] for x in journal.read(c.folder / "metrics.jsonl") if "loss" in x] for c in (whole, cut)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-9) and len(logged[0]) == 4
    place = cut.folder / "checkpoints" / "step-00000003"
    tensors = Reader(place).manifest.tensors
    packed = [saved for key, saved in tensors.items() if key.endswith(".base_layer.packed")]
    assert len(packed) == 2 * len(LORA["targets"]) and {saved.dtype for saved in packed} == {"U8"}
    assert not any(key.endswith((".base_layer.weight", ".pairs")) for key in tensors)
    adapted = plain(over(cut, unpacked(tmp_path, 4)), written(cut, tmp_path / "adapters"))
    assert main(["ckpt", "convert", str(place), str(tmp_path / "merged")]) == 0
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-9, atol=1e-9)


def test_bits_belong_to_adapters_without_dora_and_tp_and_take_less_memory(tmp_path: Path) -> None:
    base(tmp_path)
    configs = [config_of(tmp_path / "run", "chat", adapter={**LORA, "base_bits": bits}) for bits in (None, 8, 4)]
    needed = [resources.forecast(config).stages[0].parameters for config in configs]
    adapted = 2 * (16 * 16 + 16 * 16 + 2 * 16 * 24)
    assert [needed[0] - each for each in needed] == pytest.approx([0, adapted * (8 - 1), adapted * (8 - 9 / 16)])
    for more, layout in (({"dora": True}, "dp1"), ({}, "tp2")):
        with pytest.raises(ValueError, match=r"takes adapter\.base_bits without dora and tp"):
            config_of(tmp_path / "other", "chat", adapter={**LORA, "base_bits": 4, **more}, layout=layout)
    for layout, adapter, bits in (("tp2", peft.LoraConfig(), 4), ("1", None, 4), ("1", peft.LoraConfig(), 5)):
        with pytest.raises(ModelError, match=r"IG478[\s\S]*leave base_bits out"):
            ig.hf.load(tmp_path / "base", Mesh.unbound(layout), adapter=adapter, base_bits=bits)
