"""The command line: one table that says who reduces what, and errors in one message with exit code 2."""

from __future__ import annotations

import json
import os
import sys

import pytest

from isograd.cli.main import main


def test_isograd_alone_prints_its_help(capsys) -> None:
    assert main([]) == 0
    assert "isograd new quickstart" in capsys.readouterr().out


def test_explain_draws_a_layout(capsys) -> None:
    assert main(["explain", "dp2 tp2"]) == 0
    assert "data (dp cp)  [0, 2]" in capsys.readouterr().out


def test_explain_contracts_says_who_reduces_each_gradient(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["explain", "--contracts", "tiny-qwen3", "dp2 tp4 sp zero1"]) == 0
    lines = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert "dp+tp: 0-7" in lines["blocks.{0-1}.norm1.weight"]
    assert "dp+tp/2: 0, 1, 4, 5" in lines["blocks.{0-1}.attention.k.weight"]
    assert "dp: 0, 4" in lines["blocks.{0-1}.mlp.up.weight"]
    assert all(line.split("│")[-2].strip() == "none" for name, line in lines.items() if name.endswith("weight"))


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_model_config_is_read_from_a_file(tmp_path, capsys, suffix: str) -> None:
    file = tmp_path / f"model.{suffix}"
    file.write_text(json.dumps({"vocab": 64, "hidden": 16, "layers": 1, "heads": 2, "mlp": 24}))
    assert main(["explain", "--contracts", str(file), "dp2"]) == 0
    assert "64x16" in capsys.readouterr().out


def test_a_hugging_face_config_is_read_too(tmp_path, capsys) -> None:
    values = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 2, "intermediate_size": 24, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    values |= {"max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["explain", "--contracts", str(tmp_path), "tp2"]) == 0
    assert "32x16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["explan", "dp2"], ["IG600", "did you mean 'explain'"]),
        (["explain"], ["IG600", "layout"]),
        (["explain", "dp2", "tp2"], ["IG600", "'tp2'", "needs quotes"]),
        (["explain", "dp2", "--ranks", "1"], ["IG600", "'--ranks' (did you mean '--rank'?)", "isograd explain --help"]),
        (["explain", "dp2", "--contract", "tiny-llama"], ["IG600", "did you mean '--contracts'"]),
        (["explain", "dp2", "--rank", "x"], ["IG600", "'x'"]),
        (["explain", "dp2", "--width", "-5"], ["IG600", "from 40 to 10000"]),
        (["explain", "dp2 zebra1"], ["IG101", "did you mean 'zero'"]),
        (["explain", "dp2", "--rank", "7"], ["IG103", "0 to 1"]),
        (["explain", "--contracts", "tiny-lama", "dp2"], ["IG603", "did you mean 'tiny-llama'"]),
        (["explain", "--contracts", "missing/file.yaml", "dp2"], ["IG604"]),
        (["explain", "--contracts", "tiny-llama", "tp3"], ["IG406", "the nearest that works is tp2"]),
    ],
)
def test_a_mistake_is_one_message_with_exit_code_2(capsys, arguments, parts) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error
    assert "Traceback" not in error


def test_every_unknown_and_missing_key_of_a_config_is_named_at_once(tmp_path, capsys) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("vocab: 64\nhiden: 16\nlayers: 1\nheads: 2\nmpl: 24\n")
    assert main(["explain", "--contracts", str(file), "dp2"]) == 2
    error = capsys.readouterr().err
    for part in (
        "'hiden' (did you mean 'hidden'?)",
        "'mpl' (did you mean 'mlp'?)",
        "'hidden' is missing",
        "'mlp' is missing",
    ):
        assert part in error


def test_a_reader_that_leaves_a_pipe_ends_the_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `head` does, while output waits to be written; the code is that of a program which SIGPIPE ended."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["recipes"]) == 141
