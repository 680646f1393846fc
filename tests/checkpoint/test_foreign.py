"""Imports from other trainers: the commands of the page on what FSDP2 wrote, and folders that do not fit, or lie."""

from __future__ import annotations

import io
import json
import pickle
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor

from isograd.cli.main import main
from isograd.data import builtin_chats
from isograd.errors import CheckpointError, IsogradError
from isograd.integrations.checkpoints.dcp import DcpChunk, DcpFolder, _overlap
from isograd.integrations.checkpoints.foreign import ForeignCheckpoint, import_dcp
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.train import journal
from tests.checkpoint.test_dcp import CONFIG, Calls, alone, config_in, copied, kept, megatron, theirs, titan

__all__ = ["alone"]
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
SHAPE = {"hidden_size": 12, "intermediate_size": 22, "num_hidden_layers": 3, "num_attention_heads": 3}
SHAPE |= {"num_key_value_heads": 1, "vocab_size": 259, "max_position_embeddings": 64, "tie_word_embeddings": False}
Tensors = dict[str, Tensor]


def fsdp2(folder: Path) -> Tensors:
    """On two ranks: a model of transformers in bf16 under FSDP2, one step of Adam, saved whole. Its weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    for block in (*model.model.layers, model):
        fully_shard(block)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(input_ids=torch.arange(24)[None], labels=torch.arange(24)[None]).loss.backward()
    adam.step()
    weights, states = get_state_dict(model, adam)
    dcp.save({"model": weights, "optimizer": states, "step": 1000}, checkpoint_id=folder / "step-1000")
    found: Tensors = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return found


@pytest.mark.medium
def test_the_commands_of_the_page_import_what_fsdp2_wrote_and_train_it(
    worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    truth = worlds(2).run(fsdp2, tmp_path / "outputs" / "checkpoint")[0]
    LlamaConfig(**SHAPE).save_pretrained("models/llama")
    builtin_chats.tokenizer(tmp_path / "models" / "llama")
    chats = builtin_chats.conversations(tmp_path / "chats.jsonl", "sums")
    chats.write_text("".join(chats.read_text().splitlines(keepends=True)[:20]))
    run = {"task": "chat", "run": "run", "steps": 1, "batch": 1, "optimizer": {"lr": 1e-3}, "model": {"path": "later"}}
    run |= {"data": {"sources": [{"path": "chats.jsonl"}], "length": 150, "held_out": 0}, "log": {"sample": 0}}
    Path("run.yaml").write_text(yaml.safe_dump(run))
    block = re.search(r"```\n(isograd ckpt import .*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    commands = [shlex.split(line) for line in block[1].splitlines()]
    assert [words[1] for words in commands] == ["ckpt", "train"]
    for words in commands:
        assert main(words[1:]) == 0, words
    found = SafetensorsReader(tmp_path / "models" / "start")
    assert found.shapes.keys() == truth.keys()
    for name, tensor in truth.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(found.look(name, lambda t: t), tensor), name
    assert [line["step"] for line in journal.read(Path("run/metrics.jsonl")) if "event" not in line] == [1]


def nothing_is_left(folder: Path) -> bool:
    return not [path for path in folder.iterdir() if path.name.startswith((".out", "out"))]


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def with_(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)})


def twice_the_layers(tensors: Tensors) -> None:
    tensors.update({name: torch.cat([t, t]) for name, t in tensors.items() if ".layers." in name})


def one_more_layer(tensors: Tensors) -> None:
    more = {name.replace("layers.2.", "layers.3."): t for name, t in tensors.items() if "layers.2." in name}
    assert more
    tensors.update(more)


QKV, FC1 = "decoder.layers.self_attention.linear_qkv", "decoder.layers.mlp.linear_fc1.weight"
WQ, EMBEDDING = "layers.0.attention.wq", "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("titan", with_(f"{WQ}.weight", 25, 24), r"wq\.weight' has a shape that does not belong[\s\S]*\[25, 24\]"),
        ("titan", with_(f"{WQ}.weight", 24), r"wq\.weight' has a shape that does not belong"),
        ("titan", with_(f"{WQ}.weight"), r"wq\.weight' has a shape that does not belong"),
        ("titan", with_(f"{WQ}.bias", 24), r"no place for\n[\s\S]*1: .'layers\.0\.attention\.wq\.bias'"),
        ("titan", one_more_layer, r"no place for\n[\s\S]*9: .'layers\.3\."),
        ("titan", without("layers.1.ffn_norm.weight"), r"has no tensor 'layers\.1\.ffn_norm\.weight'"),
        ("titan", with_("tok_embeddings.weight", 64, 24), r"is \(64, 24\), not \(31, 24\)"),
        ("stacked", with_(f"{QKV}.weight", 3, 41, 24), r"linear_qkv\.weight' has a shape that does not belong"),
        ("stacked", with_(f"{QKV}.weight", 3), r"linear_qkv\.weight' has a shape that does not belong"),
        ("stacked", with_(f"{QKV}.weight"), r"another number of layers"),
        ("stacked", with_(f"{QKV}.bias", 3, 40), r"no place for\n[\s\S]*linear_qkv\.bias"),
        ("stacked", with_(FC1, 3, 1, 24), r"linear_fc1\.weight' has a shape that does not belong"),
        ("stacked", twice_the_layers, r"another number of layers[\s\S]*\[6, 40, 24\]"),
        ("stacked", with_(EMBEDDING, 40_000, 24), r"word_embeddings\.weight' has a shape that does not belong"),
        ("stacked", with_(EMBEDDING), r"word_embeddings\.weight' has a shape that does not belong"),
        ("single", one_more_layer, r"no place for\n[\s\S]*7: .'decoder\.layers\.3\."),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_the_config_is_one_error_and_leaves_nothing(
    kind: str, change: Callable[[Tensors], Any], says: str, tmp_path: Path
) -> None:
    hf = theirs()
    made = {"titan": titan, "stacked": lambda t: megatron(t, True), "single": lambda t: megatron(t, False)}[kind](hf)
    change(made)
    with pytest.raises(IsogradError, match=rf"IG420[\s\S]*{says}"):
        import_dcp(kept(tmp_path / "dcp", made), tmp_path / "out", config=config_in(tmp_path / "config"))
    assert nothing_is_left(tmp_path)


def changed(folder: Path, change: Callable[[Any], Any]) -> Path:
    """The folder with its description changed."""
    described = pickle.loads((folder / ".metadata").read_bytes())
    change(described)
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    return folder


def place_of(described: Any) -> Any:
    return next(place for index, place in described.storage_data.items() if index.fqn == "lm_head.weight")


def declares(*shape: int) -> Callable[[Any], None]:
    def change(described: Any) -> None:
        held = described.state_dict_metadata["lm_head.weight"]
        held.size = held.chunks[0].sizes = torch.Size(shape)

    return change


def bomb(described: Any) -> None:
    """A list that holds the same list twice, 40 deep: as text it is a terabyte."""
    inner: list[Any] = []
    for _ in range(40):
        inner = [inner, inner]
    place_of(described).transform_descriptors = inner


def long_name(described: Any) -> None:
    described.state_dict_metadata["\x1b[31m" + "x" * 3_000_000] = described.state_dict_metadata["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "tied", "says"),
    [
        (lambda d: setattr(place_of(d), "length", 1 << 45), False, "IG949.*lm_head[\\s\\S]* of 35184372088832 bytes"),
        (lambda d: setattr(place_of(d), "offset", 1 << 49), False, "IG949.*lm_head"),
        (declares(1 << 40, 24), False, r"IG420[\s\S]*is \(1099511627776, 24\)"),
        (declares(1 << 36, 24), True, r"IG949.*lm_head[\s\S]*bytes, which are too few"),
        (declares(1 << 40, 1 << 40), False, "IG948[\\s\\S]*'lm_head.weight': .*elements"),
        (bomb, False, r"IG948[\s\S]*transform_descriptors"),
        (long_name, False, r"IG948[\s\S]*'.x1b\[31mx{60}"),
    ],
)  # fmt: skip
def test_sizes_that_are_lies_take_no_memory_and_no_time(
    alone: Path, tmp_path: Path, change: Callable[[Any], Any], tied: bool, says: str
) -> None:
    folder = changed(copied(alone, tmp_path), lambda d: (d.state_dict_metadata.pop("turned"), change(d)))
    config = config_in(tmp_path / "config")
    values = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": tied}))
    with pytest.raises(IsogradError, match=says) as caught:
        import_dcp(folder, tmp_path / "out", config=config)
    assert len(str(caught.value)) < 2000 and "\x1b" not in str(caught.value)
    assert nothing_is_left(tmp_path)


def test_a_call_in_a_piece_is_not_made(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copied(alone, tmp_path)

    def plant(described: Any) -> None:
        place = place_of(described)
        piece = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(piece)) as old, zipfile.ZipFile(made, "w") as new:
            for info in old.infolist():
                planted = pickle.dumps(Calls(), 2) if info.filename.endswith("data.pkl") else old.read(info)
                new.writestr(info.filename, planted)
        (folder / "__9_0.distcp").write_bytes(made.getvalue())
        place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(made.getvalue())

    changed(folder, lambda d: (d.state_dict_metadata.pop("turned"), plant(d)))
    with pytest.raises(CheckpointError, match=r"IG949.*'lm_head\.weight'[\s\S]*it names 'posix\.system'"):
        import_dcp(folder, tmp_path / "out", config=config_in(tmp_path / "config"))
    assert not (tmp_path / "was-here").exists() and nothing_is_left(tmp_path)


def test_a_head_and_an_embedding_of_no_rows_are_not_equal(tmp_path: Path) -> None:
    flat = theirs() | {name: torch.zeros(()) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    with pytest.raises(IsogradError, match="IG420"):
        ForeignCheckpoint(DcpFolder(kept(tmp_path / "dcp", flat)), replace(CONFIG, tied=True))


@pytest.mark.medium
def test_pieces_overlap_where_two_cover_an_element() -> None:
    draw = torch.Generator().manual_seed(5)
    seen = []
    for _ in range(200):
        pieces = []
        covered = torch.zeros(6, 5, 4, dtype=torch.int64)
        for _ in range(int(torch.randint(1, 6, (), generator=draw))):
            start = [int(torch.randint(size, (), generator=draw)) for size in covered.shape]
            sizes = [
                int(torch.randint(1, size - at + 1, (), generator=draw))
                for at, size in zip(start, covered.shape, strict=True)
            ]
            pieces.append(DcpChunk(tuple(start), tuple(sizes), "", 0, 0))
            covered[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))] += 1
        seen.append(bool((covered > 1).any()))
        assert _overlap(pieces) == seen[-1], pieces
    assert 20 < sum(seen) < 180
    assert not _overlap([DcpChunk((row, 0), (1, 7), "", 0, 0) for row in range(100_000)])
