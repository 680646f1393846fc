"""Folders of DeepSpeed's ZeRO, as its sources lay them out: weights and Adam's states, bit for bit; nothing is run.

No DeepSpeed is needed: `zero_folder` writes what its engine saves, from the parameters and states of a plain Adam."""

from __future__ import annotations

import json
import math
import os
import pickle
from argparse import Namespace
from collections import OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.checkpoint import CheckpointManager
from isograd.checkpoint.read import Reader
from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import CheckpointError
from isograd.hf.configs import load_config, to_hf_config
from isograd.hf.families import to_hf
from isograd.integrations.checkpoints.deepspeed import ZeroFolder
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab=31, hidden=12, layers=2, heads=3, kv_heads=1, mlp=22, tied=False)
Tensors = dict[str, Tensor]


class ZeroStageEnum(IntEnum):
    weights = 3
    gradients = 2
    optimizer_states = 1


def trained() -> tuple[Tensors, Tensors, Tensors]:
    """Weights under transformers' names, and what Adam would keep of each."""
    weights = {name: tensor.float() for name, tensor in to_hf(Transformer(CONFIG, Mesh("1"))).items()}
    draw = torch.Generator().manual_seed(3)
    first = {name: torch.randn(t.shape, generator=draw) for name, t in weights.items()}
    return weights, first, {name: torch.rand(t.shape, generator=draw) for name, t in weights.items()}


def flat_of(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    """ZeRO 1 and 2: one after another, filled up to a multiple of 2 x ranks, in equal parts."""
    flat = torch.cat([t.flatten() for t in tensors])
    flat = torch.cat([flat, torch.full(((-len(flat)) % (2 * ranks),), math.nan)])
    return [part.clone() for part in flat.chunk(ranks)]


def parts_of(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    """ZeRO 3: of each tensor an equal part, the last one filled up."""
    each = []
    for t in tensors:
        size = -(-t.numel() // ranks)
        each.append(torch.cat([t.flatten(), torch.full((size * ranks - t.numel(),), math.nan)]).view(ranks, size))
    return [torch.cat([t[rank] for t in each]) for rank in range(ranks)]


def zero_folder(home: Path, stage: int, ranks: int, frozen: str = "model.norm.weight") -> tuple[Tensors, ...]:
    weights, first, second = trained()
    place = home / "global_step7"
    place.mkdir(parents=True)
    (home / "latest").write_text("global_step7")
    names = [name for name in weights if name != frozen]
    groups = [[name for name in names if weights[name].dim() == dims] for dims in (2, 1)]
    cut = parts_of if stage == 3 else flat_of
    flats = [[cut([what[name] for name in group], ranks) for group in groups] for what in (weights, first, second)]
    shapes = [OrderedDict((name, weights[name].shape) for name in group) for group in groups]
    for rank in range(ranks):
        state = {i: {"step": 7, "exp_avg": flats[1][i][rank], "exp_avg_sq": flats[2][i][rank]} for i in range(2)}
        options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
        base = {"state": state, "param_groups": [{**options, "params": [i]} for i in range(2)]}
        own: dict[str, Any] = {
            "zero_stage": ZeroStageEnum(stage),
            "partition_count": ranks if stage == 3 else [ranks] * 2,
        }
        own["loss_scaler"] = Namespace(cur_scale=1.0, seen=defaultdict(list, a=[1]))
        if stage == 3:
            own |= {"fp32_flat_groups": [flat[rank] for flat in flats[0]], "optimizer_state_dict": base}
        else:
            own |= {"single_partition_of_fp32_groups": [f[rank] for f in flats[0]], "base_optimizer_state": base}
        saved = {"optimizer_state_dict": own, "ds_config": {"zero": {(1, 2): "tuple"}}, "ds_version": "0.17"}
        torch.save(saved, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        left: Any = parts_of([weights[frozen]], ranks)[rank] if stage == 3 and frozen else weights.get(frozen)
        model = {
            "module": OrderedDict(names=None), "buffer_names": [], "param_shapes": shapes, "shared_params": {},
            "client": Namespace(lr=1),
            "frozen_param_shapes": OrderedDict({frozen: weights[frozen].shape} if frozen else {}),
            "frozen_param_fragments": OrderedDict({frozen: left.clone()} if frozen else {})
        }  # fmt: skip
        if stage == 3:
            torch.save(model, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, place / "mp_rank_00_model_states.pt")
    return weights, first, second


def config_in(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(CONFIG)))
    return folder


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2), (3, 5)])
def test_weights_and_adams_states_of_every_stage_are_read_bit_for_bit(tmp_path: Path, stage: int, ranks: int) -> None:
    weights, *states = zero_folder(tmp_path / "ds", stage, ranks)
    found = ZeroFolder(tmp_path / "ds")
    assert found.shapes.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found.full(name), tensor), name
    for what, expected in zip(("exp_avg", "exp_avg_sq"), states, strict=True):
        average = ZeroFolder(tmp_path / "ds" / "global_step7", what)
        assert average.step == 7 and average.options["betas"] == (0.9, 0.95)
        assert average.shapes.keys() == weights.keys() - {"model.norm.weight"}
        for name in average.shapes:
            assert torch.equal(average.full(name), expected[name]), name


@pytest.mark.parametrize("words", [("import",), ("convert",)])
def test_the_command_writes_a_folder_of_transformers(tmp_path: Path, capsys, words: tuple[str, ...]) -> None:
    weights, *_ = zero_folder(tmp_path / "ds", 3, 2)
    config = config_in(tmp_path / "model")
    assert main(["ckpt", *words, str(tmp_path / "ds"), str(tmp_path / "out"), "--config", str(config)]) == 0
    found = SafetensorsReader(tmp_path / "out")
    assert found.shapes.keys() == weights.keys()
    assert all(torch.equal(found.look(name, lambda t: t), tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_resumes_with_adams_states(tmp_path: Path, stage: int) -> None:
    """Under isograd's own names each tensor holds what DeepSpeed kept."""
    weights, first, second = zero_folder(tmp_path / "ds", stage, 2, frozen="")
    config = config_in(tmp_path / "model")
    words = ["import", str(tmp_path / "ds"), str(tmp_path / "out"), "--config", str(config)]
    assert main(["ckpt", *words, "--states", str(tmp_path / "saved")]) == 0
    model = Transformer(load_config(str(config)), Mesh("1"))
    engine = Engine(model, Mesh("1"), lambda ps: torch.optim.AdamW(ps, lr=1e-3))
    with CheckpointManager(tmp_path / "saved", engine) as keeper:
        found = keeper.load()
    assert found is not None and found.step == 7
    reader = Reader(found.path)
    for kind, theirs in (("model", weights), ("optimizer/exp_avg", first), ("optimizer/exp_avg_sq", second)):
        read = Transformer(CONFIG, Mesh("1"))
        with torch.no_grad():
            for name, parameter in read.named_parameters():
                parameter.copy_(reader.read(f"{kind}/{name}"))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in to_hf(read).items())
    (group,) = engine.optimizer.param_groups
    assert group["betas"] == (0.9, 0.95)
    for parameter in group["params"]:
        state = engine.optimizer.state[parameter]
        assert float(state["step"]) == 7 and state["exp_avg_sq"].min() >= 0


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch stolen",)


def test_nothing_in_the_files_is_executed_and_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zero_folder(tmp_path / "ds", 2, 2)
    place = tmp_path / "ds" / "global_step7"
    one = place / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    held = torch.load(one, weights_only=False)
    torch.save({**held, "evil": Runs()}, one)
    ZeroFolder(place)
    assert not (tmp_path / "stolen").exists()
    own = held["optimizer_state_dict"]
    short = {**own, "single_partition_of_fp32_groups": [t[:-9] for t in own["single_partition_of_fp32_groups"]]}
    for change, says in (
        ({**own, "partition_count": [3, 3]}, ""), (short, "do not fill"), ({**own, "zero_stage": 0}, ""),
        ({**own, "single_partition_of_fp32_groups": 7}, "no list"),
    ):  # fmt: skip
        torch.save({"optimizer_state_dict": change}, one)
        if says:
            with pytest.raises(CheckpointError, match=rf"IG948(.|\n)*{says}"):
                ZeroFolder(place)
    one.write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match="IG948"):
        ZeroFolder(place)
    one.unlink()
    with pytest.raises(CheckpointError, match=r"IG948(.|\n)*states of 1 ranks, of which there were"):
        ZeroFolder(place)
    assert not (tmp_path / "stolen").exists()
