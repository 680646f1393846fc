"""Errors teach: every part given is shown, codes belong to their class, and nothing is lost between processes."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isograd import errors
from isograd.errors import EngineError, IsogradError, LayoutError, did_you_mean, nearest

ROOT = Path(__file__).parents[1]
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, IsogradError)]
RANGES = {
    "LayoutError": range(100, 200),
    "LaunchError": range(250, 300),
    "CommError": range(200, 250),
    "ContractError": range(300, 400),
    "ModelError": range(400, 500),
    "EngineError": range(500, 600),
    "ConfigError": range(600, 700),
    "VerifyError": range(700, 800),
    "PipelineError": range(800, 900),
    "DataError": range(900, 930),
    "CheckpointError": range(930, 960),
    "ContrastiveError": range(960, 979),
    "TrainError": range(979, 990),
    "ChatError": range(990, 1000),
}


def raised() -> list[tuple[str, str, ast.Call]]:
    """(class, code, call) of every error the source makes."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RANGES:
                code = node.args[0]
                assert isinstance(code, ast.Constant), f"{path.name}:{node.lineno}: write the code out"
                found.append((node.func.id, code.value, node))
    return found


def test_a_message_has_the_code_first_then_every_part_that_was_given() -> None:
    error = LayoutError("IG103", "no such rank", seen=8, expected="0 to 7", fix="take one of them", where="rank 3")
    assert str(error).splitlines() == [
        "IG103: no such rank",
        "  seen:     8",
        "  expected: 0 to 7",
        "  fix:      take one of them",
        "  where:    rank 3",
    ]
    assert str(IsogradError("IG103", "no such rank")) == "IG103: no such rank"


def test_in_a_foreign_loop_functions_of_the_engine_have_the_names_of_that_loop(monkeypatch) -> None:
    monkeypatch.setattr(errors, "_loop", [])
    plain = EngineError("IG512", "no weight", fix="call engine.backward")
    errors.spoken("Fabric", {"engine.backward": "fabric.backward", "engine.step": "optimizer.step()"})
    told = EngineError("IG512", "no weight", fix="call engine.backward")
    assert "loop:" not in str(plain)
    assert "  loop:     in Fabric engine.backward is fabric.backward, engine.step is optimizer.step()" in str(told)
    assert str(pickle.loads(pickle.dumps(told))) == str(told)
    assert "loop:" not in str(EngineError("IG512", "no weight"))


@pytest.mark.parametrize("value", [0, False, 0.0, ()])
def test_a_part_that_is_empty_or_zero_is_still_shown(value: object) -> None:
    assert f"seen:     {value}" in str(IsogradError("IG512", "no weight", seen=value))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_an_error_crosses_processes_whole(kind: type[IsogradError]) -> None:
    error = kind("IG101", "what", seen=[1, 2], expected={"a": 1}, fix="fix", where="rank 1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_a_code_is_raised_by_the_class_of_its_hundred() -> None:
    found = raised()
    assert found
    wrong = [(name, code) for name, code, _ in found if int(code.removeprefix("IG")) not in RANGES[name]]
    assert not wrong


def test_every_error_says_more_than_its_first_line() -> None:
    bare = [code for _, code, call in found_without_help()]
    assert not bare, f"give seen, expected or fix: {sorted(bare)}"


def found_without_help() -> list[tuple[str, str, ast.Call]]:
    return [entry for entry in raised() if not {k.arg for k in entry[2].keywords} & {"seen", "expected", "fix", None}]


def test_the_catalogue_is_in_order_and_says_what_to_do() -> None:
    rows = re.findall(r"^\| `IG(\d{3})` \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    codes = [int(code) for code, *_ in rows]
    assert codes == sorted(set(codes))
    assert {code for _, code, _ in raised()} <= {f"IG{code}" for code in codes}


@given(st.lists(st.text("abcdefghij_", min_size=1), min_size=1, unique=True), st.data())
def test_the_nearest_word_to_a_choice_is_itself(choices: list[str], data: st.DataObject) -> None:
    word = data.draw(st.sampled_from(choices))
    assert nearest(word, choices) == word


def test_a_hint_is_given_only_when_a_choice_is_near() -> None:
    assert did_you_mean("ulyses", ["ring", "ulysses"]) == " (did you mean 'ulysses'?)"
    assert did_you_mean("xqz", ["ring", "ulysses"]) == ""
    assert nearest("", ["ring"]) is None
    assert nearest("ring", []) is None
