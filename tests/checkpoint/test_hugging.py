"""Hugging Face -> isograd under a layout -> one step -> Hugging Face: transformers loads it and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.checkpoint import CheckpointManager, SavedWeights, files
from isograd.checkpoint.manifest import Damage
from isograd.core.mesh import Mesh
from isograd.engine import Engine, empty_parameters
from isograd.errors import CheckpointError, ModelError
from isograd.hf import export_hf
from isograd.hf.configs import from_hf_config, load_config
from isograd.hf.export import convert
from isograd.hf.families import HuggingFace
from isograd.models import Transformer
from tests.checkpoint import toys
from tests.models.test_families import SMALL, full_config, theirs, tokens_of

# Each family under a layout of its own; together they are every axis and stage.
LAYOUTS = {
    "gpt2": "dp2 tp2 sp zero3",
    "neox": "dp2 pp2 zero1",
    "neox-serial": "tp4",
    "llama": "pp2 tp2 sp",
    "llama-bias": "dp4 zero3",
    "smollm": "dp2 pp2",
    "mistral": "cp2 ulysses tp2",
    "qwen3": "tp4 sp",
    "qwen3-moe": "dp2 tp2 sp ep4 zero1",
}
SHARD = 30e-6  # of 30 kB


def sgd(shards: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(shards, lr=0.1)


def halves() -> tuple[Tensor, Tensor]:
    window = tokens_of(8)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def share(mesh: Mesh) -> tuple[Tensor, Tensor]:
    tokens, labels = halves()
    part = slice(mesh.index("dp"), None, mesh.size("dp"))
    return tokens[part], labels[part]


def there_and_back(source: Path, layout: str, out: Path) -> tuple[float, Tensor | None]:
    """(loss, logits) after one step; exported, and saved for `convert`."""
    mesh = Mesh(layout)
    config = load_config(str(source))
    model = Transformer(config, mesh, device="meta")
    engine = Engine(model, mesh, sgd, weights=HuggingFace(source, config))
    engine.train_step(share(mesh), 2)
    export_hf(engine, out / "exported", tokenizer=source, max_shard_gb=SHARD)
    with CheckpointManager(out / "kept", engine) as keeper:
        keeper.save(1)
    model.eval()
    loss = engine.evaluate(share(mesh)).loss
    with torch.no_grad():
        return loss, model(halves()[0]) if mesh.size("pp") == 1 else None


def all_families(home: Path) -> dict[str, tuple[float, Tensor | None]]:
    return {name: there_and_back(home / name, layout, home / f"{name}-out") for name, layout in LAYOUTS.items()}


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def on_one_device(source: Path, kept: Path) -> Tensor:
    """Logits of what a pipeline has trained."""
    config, mesh = load_config(str(source)), Mesh("1")
    model = Transformer(config, mesh, device="meta")
    Engine(model, mesh, sgd, weights=SavedWeights(kept))
    with torch.no_grad():
        return model.eval()(halves()[0])


def stored(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def test_every_family_goes_there_and_back_under_some_layout(worlds, tmp_path: Path) -> None:
    assert LAYOUTS.keys() == SMALL.keys()
    for name in LAYOUTS:
        theirs(name, torch.float32).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
    answers = worlds(4).run(all_families, tmp_path)[0]
    tokens, labels = halves()
    for name, (loss, logits) in answers.items():
        out = tmp_path / f"{name}-out"
        model = loaded(out / "exported")
        assert type(model) is type(theirs(name, torch.float32))
        with torch.no_grad():
            expected = model(tokens).logits
        assert loss == pytest.approx(float(F.cross_entropy(expected.flatten(0, 1), labels.flatten())), rel=1e-5)
        ours = on_one_device(tmp_path / name, out / "kept") if logits is None else logits
        assert float((ours - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))
        changed = [not torch.equal(new, old) for new, old in zip(
            model.state_dict().values(), theirs(name, torch.float32).state_dict().values(), strict=True)]  # fmt: skip
        assert sum(changed) > 0.9 * len(changed), "one step changes weights"
        assert from_hf_config(model.config) == from_hf_config(full_config(name))
        index = json.loads((out / "exported" / "model.safetensors.index.json").read_text())
        files = sorted(p.name for p in (out / "exported").glob("*.safetensors"))
        assert len(files) > 1
        assert sorted(set(index["weight_map"].values())) == files
        assert (out / "exported" / "tokenizer.json").read_text() == "{}"
        convert(out / "kept" / "step-00000001", out / "converted", tokenizer=tmp_path / name)
        one, other = stored(out / "exported"), stored(out / "converted")
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert len(list((out / "converted").glob("*.safetensors"))) == 1


def their_own(source: Path, out: Path) -> Tensor:
    """A model of transformers, trained as it is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    mesh = Mesh("dp2 zero3")
    with empty_parameters():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    engine = Engine(model, mesh, sgd, weights=source)
    tokens, labels = share(mesh)
    engine.backward(F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()), weight=labels.numel())
    engine.step()
    export_hf(engine, out, dtype=torch.float64)
    with torch.no_grad():
        return model.eval()(halves()[0]).logits


def test_a_model_of_transformers_itself_goes_there_and_back(worlds, tmp_path: Path) -> None:
    theirs("smollm", torch.float32).save_pretrained(tmp_path / "in")
    logits = worlds(2).run(their_own, tmp_path / "in", tmp_path / "out")[0]
    model = loaded(tmp_path / "out")
    assert {t.dtype for t in stored(tmp_path / "out").values()} == {torch.float64}
    with torch.no_grad():
        assert float((model(halves()[0]).logits - logits).abs().max()) < 1e-5


def without_engine(out: Path, layout: str) -> None:
    export_hf(Transformer(toys.CONFIGS["gpt2"], Mesh(layout)), out)


@pytest.mark.medium
def test_a_model_that_no_engine_holds_goes_out_too(worlds, tmp_path: Path) -> None:
    worlds(4).run(without_engine, tmp_path / "four", "pp2 tp2")
    without_engine(tmp_path / "one", "1")
    four, one = stored(tmp_path / "four"), stored(tmp_path / "one")
    assert four.keys() == one.keys()
    assert all(torch.equal(four[name], one[name]) for name in one)


def full_disk(out: Path) -> tuple[list[str], bool]:
    """Rank 0 cannot write: all ranks say so, nothing is left, and what comes next works."""
    from tests.checkpoint.test_writing import largest_file

    engine, said = toys.engine_of("tp2", "gpt2"), []
    with largest_file(10_000 if engine.mesh.rank == 0 else 1 << 40), pytest.raises(CheckpointError) as error:
        export_hf(engine, out / "new")
    said.append(str(error.value))
    for target, tokenizer in ((out, None), (out / "new", out / "none")):
        with pytest.raises(CheckpointError) as error:
            export_hf(engine, target, tokenizer=tokenizer)
        said.append(str(error.value))
    left = sorted(p.name for p in out.iterdir())
    export_hf(engine, out / "new")
    return said, left == ["occupied"]


@pytest.mark.medium
def test_an_export_that_cannot_be_written_is_refused_on_all_ranks_and_leaves_nothing(worlds, tmp_path: Path) -> None:
    (tmp_path / "occupied").touch()
    answers = worlds(2).run(full_disk, tmp_path)
    assert answers[0] == answers[1]
    said, clean = answers[0]
    assert [error[:5] for error in said] == ["IG930", "IG943", "IG944"]
    assert clean
    assert (tmp_path / "new" / "config.json").is_file()


class Plain(torch.nn.Linear):
    pass


def test_a_model_that_hugging_face_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    engine = Engine(Plain(3, 2), Mesh("1"), sgd)
    with pytest.raises(CheckpointError, match="IG942: a Plain"):
        export_hf(engine, tmp_path / "out")


def test_an_export_that_reads_back_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flips = toys.lying_disk(lambda path, data: data[:-1] + bytes([data[-1] ^ 1]))
    monkeypatch.setattr(files, "open_to_write", flips)
    with pytest.raises(CheckpointError, match="IG945"):
        export_hf(toys.engine_of("1", "gpt2"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, toys.engine_of("1", "gpt2")) as keeper:
        keeper.save(1)
    shard = next((tmp_path / "step-00000001").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="IG936") as error:
        convert(tmp_path / "step-00000001", tmp_path / "out")
    assert isinstance(error.value.__cause__, Damage)
    assert not (tmp_path / "out").exists()


def test_weights_of_another_config_are_refused_when_they_are_asked_for(tmp_path: Path) -> None:
    state = {n: t.detach() for n, t in theirs("llama", torch.float32).named_parameters()}
    weights = HuggingFace(state, from_hf_config(full_config("llama")))
    assert not weights.has("blocks.7.norm1.weight", (32,))
    with pytest.raises(ModelError, match="IG423"):
        weights.has("norm.weight", (33,))
