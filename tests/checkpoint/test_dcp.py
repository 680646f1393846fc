"""Folders that torch.distributed.checkpoint writes: read under every naming, and refused when they are hostile."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.errors import CheckpointError, IsogradError
from isograd.hf.configs import to_hf_config
from isograd.hf.families import to_hf
from isograd.integrations.checkpoints.dcp import DcpFolder
from isograd.integrations.checkpoints.foreign import ForeignCheckpoint, import_dcp
from isograd.integrations.checkpoints.opcodes import RefusedOpcode, value_in
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab=31, hidden=24, layers=3, heads=6, kv_heads=2, mlp=36, tied=False)


def theirs(layout: str = "dp1") -> dict[str, Tensor]:
    return to_hf(Transformer(CONFIG, Mesh(layout), dtype=torch.bfloat16))


def titan(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """As Meta's names have it: pairs of a rotation are neighbours."""

    def neighbours(weight: Tensor, heads: int) -> Tensor:
        d = len(weight) // heads
        rows = [head * d + half * d // 2 + pair for head in range(heads) for pair in range(d // 2) for half in (0, 1)]
        return weight[rows]

    found = {
        "tok_embeddings.weight": hf["model.embed_tokens.weight"],
        "norm.weight": hf["model.norm.weight"],
        "output.weight": hf["lm_head.weight"],
    }
    names = {
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }  # fmt: skip
    for i in range(CONFIG.layers):
        for name, of in names.items():
            found[f"layers.{i}.{name}.weight"] = hf[f"model.layers.{i}.{of}.weight"]
        for name, of, heads in (("wq", "q_proj", 6), ("wk", "k_proj", 2)):
            found[f"layers.{i}.attention.{name}.weight"] = neighbours(
                hf[f"model.layers.{i}.self_attn.{of}.weight"], heads
            )
    return found


def megatron(hf: dict[str, Tensor], stacked: bool) -> dict[str, Tensor]:
    def padded(weight: Tensor) -> Tensor:
        return torch.cat([weight, torch.full((5, weight.shape[1]), 7.0, dtype=weight.dtype)])

    layers: dict[str, list[Tensor]] = {}
    for i in range(CONFIG.layers):
        of = {name.removeprefix(f"model.layers.{i}."): t for name, t in hf.items() if f".layers.{i}." in name}
        q, k, v = (of[f"self_attn.{n}_proj.weight"] for n in "qkv")
        groups = [
            part for g in range(2) for part in (q[12 * g : 12 * g + 12], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4])
        ]
        for name, tensor in (
            ("self_attention.linear_qkv.weight", torch.cat(groups)),
            ("self_attention.linear_qkv.layer_norm_weight", of["input_layernorm.weight"]),
            ("self_attention.linear_proj.weight", of["self_attn.o_proj.weight"]),
            ("mlp.linear_fc1.layer_norm_weight", of["post_attention_layernorm.weight"]),
            ("mlp.linear_fc2.weight", of["mlp.down_proj.weight"]),
        ):
            layers.setdefault(name, []).append(tensor)
        gate, up = of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]
        for name, tensor in (
            {"weight": torch.cat([gate, up])}.items() if stacked else (("weight_w", gate), ("weight_v", up))
        ):
            layers.setdefault(f"mlp.linear_fc1.{name}", []).append(tensor)
    found = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": padded(hf["lm_head.weight"]),
    }
    for name, each in layers.items():
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack(each)
        else:
            found |= {f"decoder.layers.{i}.{name}": tensor for i, tensor in enumerate(each)}
    return found


class Named(nn.Module):
    """Parameters under these names, as modules in modules."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            home: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(home, part):
                    home.add_module(part, nn.Module())
                home = getattr(home, part)
            home.register_parameter(leaf, nn.Parameter(tensor))


def save(folder: Path) -> None:
    """On two ranks: FSDP2 with Adam, tp and stacks by DTensors."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    hf, mesh = theirs("dp2"), init_device_mesh("cpu", (2,))
    model = Named(titan(hf))
    fully_shard(model, mesh=mesh)
    adam = torch.optim.Adam(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    weights, states = get_state_dict(model, adam)
    dcp.save(
        {"model": weights, "optimizer": states, "step": 3, "note": {"a": [1.5, "b"]}}, checkpoint_id=folder / "titan"
    )

    def cut(tensors: dict[str, Tensor]) -> dict[str, Any]:
        def way(tensor: Tensor, number: int) -> Any:
            return Replicate() if tensor.dim() == 1 else Shard(number % tensor.dim())

        return {name: distribute_tensor(t, mesh, [way(t, n)]) for n, (name, t) in enumerate(tensors.items())}

    dcp.save({"app": {"model": cut(hf)}}, checkpoint_id=folder / "hf")
    for stacked in (True, False):
        state = cut(megatron(hf, stacked)) | {"decoder.layers.self_attention._extra_state": io.BytesIO(b"x")}
        state["optimizer.state.exp_avg.embedding.word_embeddings.weight"] = torch.zeros(36, 24)
        dcp.save(state, checkpoint_id=folder / f"megatron-{stacked}")


def config_in(folder: Path) -> Path:
    import json

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(CONFIG)))
    return folder


@pytest.mark.medium
def test_what_two_ranks_wrote_is_read_bit_by_bit_under_all_names(worlds, tmp_path: Path) -> None:
    worlds(2).run(save, tmp_path)
    config, truth = config_in(tmp_path / "config"), theirs()
    for name in ("titan", "hf", "megatron-True", "megatron-False"):
        words = ["ckpt", "import", str(tmp_path / name), str(tmp_path / f"{name}-out"), "--config", str(config)]
        assert main(words) == 0
        found = SafetensorsReader(tmp_path / f"{name}-out")
        assert found.shapes.keys() == truth.keys(), name
        for key, tensor in truth.items():
            assert torch.equal(found.look(key, lambda t: t), tensor), (name, key)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that one process wrote."""
    folder = tmp_path_factory.mktemp("dcp") / "hf"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**theirs(), "turned": torch.arange(6.0).view(2, 3).t()}, checkpoint_id=folder, no_dist=True)
    return folder


def copied(alone: Path, to: Path) -> Path:
    return Path(shutil.copytree(alone, to / "copy"))


def test_a_folder_of_one_process_is_read_and_a_wrong_config_is_refused(alone: Path, tmp_path: Path) -> None:
    assert torch.equal(DcpFolder(alone).full("turned"), torch.arange(6.0).view(2, 3).t())
    config_in(tmp_path / "config")
    with pytest.raises(IsogradError, match=r"IG420[\s\S]*turned is not used"):
        import_dcp(alone, tmp_path / "out", config=tmp_path / "config")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*partial"))


def kept(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_of_several_models_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, hf = config_in(tmp_path / "config"), theirs()
    more = {name: tensor + 1 for name, tensor in hf.items()}
    folder = kept(tmp_path / "dcp", {**hf, "ema": more, "optimizer": {"state": {"exp_avg": more}}})
    with pytest.raises(IsogradError, match=r"IG420[\s\S]*2 models[\s\S]*'' \(transf[\s\S]*'ema\.' \(transf"):
        import_dcp(folder, tmp_path / "out", config=config)
    with pytest.raises(IsogradError, match=r"IG420.*behind 'em'[\s\S]*'ema\.' \(transf"):
        import_dcp(folder, tmp_path / "out", config=config, prefix="em")
    words = ["ckpt", "import", str(folder), str(tmp_path / "ema"), "--config", str(config), "--prefix", "ema."]
    assert main(words) == 0
    assert "names of transformers behind 'ema.'" in capsys.readouterr().out
    assert main([*words[:3], str(tmp_path / "plain"), *words[4:6], "--prefix", ""]) == 0
    for name, truth in (("ema", more), ("plain", hf)):
        found = SafetensorsReader(tmp_path / name)
        assert all(torch.equal(found.look(key, lambda t: t), tensor) for key, tensor in truth.items()), name


def test_dtypes_are_widened_and_those_that_are_no_weights_refused(tmp_path: Path) -> None:
    config, hf = config_in(tmp_path / "config"), theirs()
    norm = "model.norm.weight"
    large = {name: tensor * 1e5 if name == norm else tensor.half() for name, tensor in hf.items()}
    others = [torch.complex64, torch.uint16, torch.float8_e4m3fn]
    beside = {f"extra{number}": torch.zeros(3).to(dtype) for number, dtype in enumerate(others)}
    folder = kept(tmp_path / "dcp", {"model": large, **beside})
    import_dcp(folder, tmp_path / "out", config=config)
    found = SafetensorsReader(tmp_path / "out").look(norm, lambda t: t)
    assert found.dtype == torch.float32 and torch.equal(found, large[norm].float()) and found.isfinite().all()
    for number, dtype in enumerate(others):
        with pytest.raises(CheckpointError, match=rf"IG941[\s\S]*{dtype}"):
            DcpFolder(folder).full(f"extra{number}")
    whole = {**hf, norm: torch.ones(CONFIG.hidden, dtype=torch.int8)}
    with pytest.raises(IsogradError, match=rf"IG420.*{norm}[\s\S]*int8"):
        import_dcp(kept(tmp_path / "int8", whole), tmp_path / "none", config=config)


@pytest.mark.parametrize("kind", ["transformers", "torchtitan", "Megatron-Core"])
def test_a_head_that_differs_is_refused_by_a_tied_config(kind: str, tmp_path: Path) -> None:
    tied, hf = replace(CONFIG, tied=True), theirs()
    named = {"transformers": lambda t: t, "torchtitan": titan, "Megatron-Core": lambda t: megatron(t, True)}[kind]
    with pytest.raises(IsogradError, match=r"IG420[\s\S]*(lm_head|output|output_layer)\.weight' differs from"):
        ForeignCheckpoint(DcpFolder(kept(tmp_path / "differs", named(hf))), tied)
    same = hf | {"lm_head.weight": hf["model.embed_tokens.weight"]}
    assert ForeignCheckpoint(DcpFolder(kept(tmp_path / "same", named(same))), tied).kind == kind


class Calls:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-here",)


class Builds:
    def __reduce__(self) -> Any:
        return torch.Size, ((1,),), {"a": 1}


def nested(depth: int) -> bytes:
    return b"\x80\x04}(" + b")" + b"\x85" * depth + b"K\x01u."


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Calls()), pickle.dumps({"state_dict_metadata": [Calls()]}, 2), pickle.dumps(Calls(), 0),
        pickle.dumps(print), pickle.dumps(Path), pickle.dumps(nn.Linear(2, 2)), pickle.dumps(Builds()), pickle.dumps(3),
        b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"abc.", b"\x80\x04K\x01r\xff\xff\xff\xff.", b"", b".",
        b"\x80\x04\x8b\xff\xff\xff\x7f.", nested(60_000), b"\x80\x04e.", b"\x80\x04ub.", b"\x80\x04h\x05.",
        b"\x80\x04]\x94h\x00a.", b"garosctouch\nsystem\n.", b"(" * 40_000 + b".", b"\x80\x04}]K\x01s.",
    ],
    ids=range(21),
)  # fmt: skip
def test_a_hostile_description_is_refused_and_nothing_is_executed(
    data: bytes, alone: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copied(alone, tmp_path)
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match="IG948"):
        DcpFolder(folder)
    assert not (tmp_path / "was-here").exists()


def test_a_truncated_or_flipped_description_is_refused_or_read(alone: Path, tmp_path: Path) -> None:
    folder = copied(alone, tmp_path)
    whole = (folder / ".metadata").read_bytes()
    draw = torch.Generator().manual_seed(0)
    places = torch.randint(len(whole), (60,), generator=draw).tolist()
    for number, place in enumerate(places):
        changed = (
            whole[:place]
            if number % 2
            else whole[:place] + bytes([whole[place] ^ (1 << number % 8)]) + whole[place + 1 :]
        )
        (folder / ".metadata").write_bytes(changed)
        try:
            found = DcpFolder(folder)
            for name in found.tensors:
                found.full(name)
        except CheckpointError as error:
            assert error.code in ("IG948", "IG949")


def test_links_and_lies_about_pieces_are_refused(alone: Path, tmp_path: Path) -> None:
    folder = copied(alone, tmp_path)
    (data,) = folder.glob("*.distcp")
    secret = tmp_path / "secret"
    data.rename(secret)
    data.symlink_to(secret)
    name = "lm_head.weight"
    with pytest.raises(CheckpointError, match=r"IG949[\s\S]*symbolic link"):
        DcpFolder(folder).full(name)
    data.unlink()
    with pytest.raises(CheckpointError, match="IG949"):
        DcpFolder(folder).full(name)
    data.write_bytes(secret.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="IG949"):
        for each in DcpFolder(folder).tensors:
            DcpFolder(folder).full(each)
    secret.rename(data)
    found = DcpFolder(folder)
    held = found.tensors[name]
    for wrong in (replace(held, dtype=torch.float32), replace(held, pieces=(replace(held.pieces[0], sizes=(24, 31)),))):
        found.tensors[name] = wrong
        with pytest.raises(CheckpointError, match="IG949"):
            found.full(name)
    told = pickle.loads((folder / ".metadata").read_bytes())
    for change in ("outside", "twice", "elsewhere"):
        meta = pickle.loads(pickle.dumps(told))
        chunks = meta.state_dict_metadata[name].chunks
        if change == "outside":
            chunks[0].sizes = torch.Size((32, 24))
        elif change == "twice":
            meta.state_dict_metadata[name].size = torch.Size((62, 24))
            chunks.append(chunks[0])
        else:
            index = next(index for index in meta.storage_data if index.fqn == name)
            meta.storage_data[index].relative_path = "../secret"
        (folder / ".metadata").write_bytes(pickle.dumps(meta))
        with pytest.raises(CheckpointError, match="IG948"):
            DcpFolder(folder)
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"IG948[\s\S]*symbolic link"):
        DcpFolder(folder)


def test_what_a_pickle_says_is_followed_and_not_done() -> None:
    made = value_in(
        pickle.dumps((torch.Size([2, 3]), {"a": [1, None, True, 2.5, b"x", "y" * 300]}, ())), {"torch.Size"}
    )
    assert made[0].name == "torch.Size" and made[0].args == ((2, 3),)
    assert made[1:] == ({"a": [1, None, True, 2.5, b"x", "y" * 300]}, ())
    with pytest.raises(RefusedOpcode, match=r"torch\.Size"):
        value_in(pickle.dumps(torch.Size([1])), ())
