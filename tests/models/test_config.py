"""Configs: numbers stay numbers however a file spells them, and a wrong value is one error, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isograd.errors import ConfigError
from isograd.hf.configs import load_config
from isograd.models import TransformerConfig

OURS = {"vocab": 64, "hidden": 16, "layers": 1, "heads": 2, "mlp": 24}
LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "rms_norm_eps": 1e-06, "hidden_act": "silu", "max_position_embeddings": 32,
}  # fmt: skip


def test_an_epsilon_without_a_point_is_a_number_in_json_and_yaml(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert '"rms_norm_eps": 1e-06' in json.dumps(LLAMA)
    assert load_config(str(tmp_path)).norm_eps == 1e-6
    (tmp_path / "ours.yaml").write_text(json.dumps(OURS).replace("{", "{norm_eps: 1e-6, "))
    assert load_config(str(tmp_path / "ours.yaml")).norm_eps == 1e-6


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"vocab": "64"}, "vocab is of type int, not '64'"),
        ({"vocab": None}, "vocab is of type int, not None"),
        ({"hidden": 16.5}, "hidden is of type int"),
        ({"layers": True}, "layers is of type int, not True"),
        ({"tied": "no"}, "tied is of type bool, not 'no'"),
        ({"dropout": "x"}, "dropout is of type float"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(change: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match="IG601") as error:
        TransformerConfig.from_dict({**OURS, **change})
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"model_type": "llama"}', "IG602"),
        ('{"model_type": [1]}', "IG607"),
        ("1: 2\nvocab: 64\n", "IG602"),
        ("[" * 5000, "IG606"),
        ("{" * 5000, "IG606"),
        ("- vocab\n", "IG606"),
    ],
)
def test_a_file_that_is_no_config_is_one_error(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(ConfigError, match=code):
        load_config(str(tmp_path / "model.yaml"))


def test_a_vocabulary_that_no_id_can_name_is_refused(tmp_path: Path) -> None:
    """FAILURES E15: one of 2^40 was taken."""
    TransformerConfig(**{**OURS, "vocab": 1 << 32})
    with pytest.raises(ConfigError, match=r"IG601.*vocab 1099511627776 .* at most 4294967296"):
        TransformerConfig(**{**OURS, "vocab": 1 << 40})
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": (1 << 32) + 1}))
    with pytest.raises(ConfigError, match=r"IG601.*vocab 4294967297"):
        load_config(str(tmp_path))
