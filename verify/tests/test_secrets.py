"""Command lines with secrets: masked in everything that `isograd-verify run` writes. FAILURES E14."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isograd_verify.command import main
from isograd_verify.run.attach import masked


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hf-token", "abc", "--steps", "3"], ["--hf-token", "***", "--steps", "3"]),
        (["env", "WANDB_API_KEY=abc", "python"], ["env", "WANDB_API_KEY=***", "python"]),
        (["--db.password=a b c"], ["--db.password=***"]),
        (["sh", "-c", "A=1 SECRET=abc x --token abc -n 2"], ["sh", "-c", "A=1 SECRET=*** x --token *** -n 2"]),
        (["--my-password", "-", "-n"], ["--my-password", "-", "-n"]),
        (["--data", "https://me:abc@host/x?access_token=abc&n=1"], ["--data", "https://***@host/x?access_token=***&n=1"]),
        (['{"credential": "abc", "n": 1}'], ['{"credential": "***", "n": 1}']),
        (["-H", "Authorization: Bearer abc"], ["-H", "Authorization: Bearer ***"]),
        (["--tokenizer", "gpt2", "--max-tokens=8"], ["--tokenizer", "gpt2", "--max-tokens=8"]),
        (["--no-token", "--fast", "s3://bucket/x"], ["--no-token", "--fast", "s3://bucket/x"]),
    ],
)  # fmt: skip
def test_values_that_their_names_call_secret_are_masked(words: list[str], shown: list[str]) -> None:
    assert masked(words) == shown


OUTPUTS = {"json": "--json", "html": "--html", "junit": "--junit", "sarif": "--sarif"}


@pytest.mark.medium
def test_no_output_holds_a_secret_of_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The recording, the page, JUnit, SARIF, the JSON and the terminal had it verbatim; the program still has it."""
    program = tmp_path / "program.py"
    to = str(tmp_path / "argv")
    program.write_text(f"import sys, pathlib\npathlib.Path({to!r}).write_text(' '.join(sys.argv))\n")
    record = tmp_path / "recorded"
    wanted = [word for name, option in OUTPUTS.items() for word in (option, str(tmp_path / f"report.{name}"))]
    secret = "s3cr3tvalue"
    command = [sys.executable, str(program), "--api-key", secret, f"password={secret}", f"https://u:{secret}@h/"]
    main(["run", "--record", str(record), *wanted, "--", *command])
    said = capfd.readouterr()
    assert secret in (tmp_path / "argv").read_text()
    assert secret not in said.out + said.err
    assert "***" in (record / "recording.json").read_text()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "argv"]
    assert {f"report.{name}" for name in OUTPUTS} - {"report.json"} <= {path.name for path in written}
    assert not [path for path in written if secret.encode() in path.read_bytes()]
