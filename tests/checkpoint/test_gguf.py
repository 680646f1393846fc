"""GGUF files: the gguf package and transformers, two readers that are not ours, find what was saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.checkpoint import CheckpointManager
from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.data import builtin_chats
from isograd.engine import Engine
from isograd.errors import CheckpointError
from isograd.hf.gguf_file import write_gguf
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.models import Transformer, TransformerConfig

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.peers
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 64, "tie_word_embeddings": False}


def folder_of(home: Path, kind: str, **more: Any) -> Any:
    """A model of transformers with norms that are not all one, and a tokenizer."""
    import transformers

    torch.manual_seed(1)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SHAPE, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(home)
    builtin_chats.tokenizer(home)
    return model.eval()


def test_without_the_package_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    engine = Engine(
        Transformer(TransformerConfig(vocab=264, hidden=16, layers=1, heads=2, mlp=32), Mesh("1")),
        Mesh("1"),
        lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    with CheckpointManager(tmp_path / "saved", engine) as keeper:
        keeper.save(1)
    assert main(["ckpt", "convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--gguf", "f16"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_a_checkpoint_s_weights_are_read_back_by_the_gguf_reader(tmp_path: Path, kind: str) -> None:
    config = TransformerConfig(vocab=264, hidden=64, layers=2, heads=4, kv_heads=2, mlp=96, tied=False)
    engine = Engine(Transformer(config, Mesh("1")), Mesh("1"), lambda ps: torch.optim.SGD(ps, lr=0.1))
    with CheckpointManager(tmp_path / "saved", engine) as keeper:
        keeper.save(1)
    builtin_chats.tokenizer(tmp_path / "words")
    words = ["ckpt", "convert", tmp_path / "saved", tmp_path / "out", "--tokenizer", tmp_path / "words", "--gguf", kind]
    assert main([str(word) for word in words if word not in ("--tokenizer", tmp_path / "words")]) == 2
    assert not (tmp_path / "out").exists()  # what is refused leaves the name free
    assert main(list(map(str, words))) == 0
    saved = SafetensorsReader(tmp_path / "out")
    reader = gguf.GGUFReader(tmp_path / "out" / f"model-{kind}.gguf")
    found = {one.name: one for one in reader.tensors}
    assert len(found) == len(saved.shapes)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, shape in saved.shapes.items():
        tensor, one = saved.look(name, lambda t: t), found[names.get_name(name, try_suffixes=(".weight",))]
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:  # to neighbours: pair i of a head is rows i and i + half
            half = 64 // 4 // 2
            tensor = torch.stack([t for h in range(heads) for i in range(half) for t in
                                  (tensor[2 * half * h + i], tensor[2 * half * h + half + i])])  # fmt: skip
        read = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy()).view(shape)
        if kind == "f32" or len(shape) == 1:
            assert torch.equal(read, tensor), name
        elif kind == "f16":
            assert torch.equal(read, tensor.half().float()), name
        else:  # a scale in f16 for 32 elements, which are rounded to 255 steps
            steps = tensor.view(-1, 32).abs().amax(1, keepdim=True) / 127
            assert ((read - tensor).view(-1, 32).abs() <= steps * 0.5 + tensor.view(-1, 32).abs() / 1000).all(), name


@pytest.mark.parametrize(("kind", "more"), [("Llama", {}), ("Qwen2", {}), ("Qwen3", {"head_dim": 128})])
def test_transformers_computes_the_same_from_the_file(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = folder_of(tmp_path, kind, **more)
    path = write_gguf(tmp_path, "f32")
    read = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=path.name, dtype=torch.float32).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_and_what_is_known_of_it_are_in_the_file(tmp_path: Path) -> None:
    folder_of(tmp_path, "Llama")
    fields = gguf.GGUFReader(write_gguf(tmp_path, "f16")).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 264 and tokens[260] == "[PAD260]" and tokens[258] == builtin_chats.STOP
    assert fields["tokenizer.ggml.token_type"].contents()[256:] == [3, 3, 3, *[5] * 5]
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 258
    assert fields["tokenizer.chat_template"].contents() == builtin_chats.TEMPLATE
    assert fields["llama.attention.head_count_kv"].contents() == 2


def test_text_becomes_the_tokens_of_the_saved_tokenizer(tmp_path: Path) -> None:
    """Merges, too: as transformers makes a tokenizer of the file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    folder_of(tmp_path, "Llama")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ["the cat and the dog, the hat and then 12 more; it's theirs"] * 3
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=264, initial_alphabet=alphabet, show_progress=False))
    builtin_chats.save_tokenizer(tmp_path, made.to_str(), "the")
    path = write_gguf(tmp_path, "f16")
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    read = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    for text in (texts[0], "Thé cat\n\n  it's 2026"):
        assert read(text, add_special_tokens=False)["input_ids"] == made.encode(text).ids


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "'linear'"),
        ({"model_type": "gpt2"}, "'gpt2'"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    import json

    folder_of(tmp_path, "Llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    with pytest.raises(CheckpointError, match=f"IG953(.|\n)*{says}"):
        write_gguf(tmp_path, "f16")


def test_llama_3_s_scaled_positions_are_those_of_transformers(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = folder_of(tmp_path, "Llama", rope_parameters=scaled | {"original_max_position_embeddings": 32})
    reader = gguf.GGUFReader(write_gguf(tmp_path, "f16"))
    (divisors,) = (torch.from_numpy(one.data.copy()) for one in reader.tensors if one.name == "rope_freqs.weight")
    plain = 1e4 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / divisors, model.model.rotary_emb.inv_freq)
