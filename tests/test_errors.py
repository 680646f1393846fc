"""Errors teach: every part given is shown, codes belong to their class, and nothing is lost between processes."""

from __future__ import annotations

import ast
import pickle
import re
import runpy
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isograd import errors
from isograd.errors import CheckpointError, DataError, IsogradError, LayoutError, catalogue, did_you_mean, nearest

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
    "PlanError": range(270, 280),
    "NetworkError": range(290, 300),
    "PipelineError": range(800, 850),
    "IntegrationError": range(850, 890),
    "DataError": range(900, 930),
    "CheckpointError": range(930, 960),
    "ContrastiveError": range(960, 979),
    "TrainError": range(979, 990),
    "ChatError": range(990, 1000),
    "FileError": range(660, 670),
    "NotFinite": range(946, 947),
}


@lru_cache
def raised() -> list[tuple[str, str, ast.Call]]:
    """(class, code, call) of every error the source makes."""
    found = []
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "verify" / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RANGES:
                first = node.args[0]
                for code in [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]:
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
    helps = {code for code, texts in catalogue().items() if len(texts) > 1}
    said = [(code, {k.arg for k in call.keywords}) for _, code, call in raised()]
    bare = [code for code, given in said if code not in helps and not given & {"seen", "expected", "fix", None}]
    assert not bare, f"give seen, expected or fix: {sorted(bare)}"


@pytest.mark.medium
def test_a_call_gives_the_fields_of_its_code_in_the_catalogue_or_texts_of_its_own() -> None:
    used = set()
    for _, code, call in raised():
        if len(call.args) > 1:
            assert code not in catalogue(), f"{code} has its text in the catalogue"
            continue
        used.add(code)
        given = {k.arg for k in call.keywords}
        texts = [text for label, text in catalogue()[code].items() if label not in given]
        fields = {field for text in texts for field in re.findall(r"\{(\w+)[^{}]*\}", text.replace("{{", ""))}
        assert given - {"seen", "expected", "fix", "where"} == fields, code
    assert used == set(catalogue())


def test_texts_of_the_catalogue_are_filled_and_may_be_replaced() -> None:
    error = DataError("IG902", seen="3 bytes", path="a.bin", size=4)
    assert str(error).splitlines() == [
        "IG902: a.bin is missing, or has another size than its manifest says",
        "  seen:     3 bytes",
        "  expected: 4 bytes",
        "  fix:      copy the folder again, or build it again",
    ]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "  fix:      wait\n" in f"{DataError('IG902', fix='wait', where='rank 1', path='a.bin', size=4)}"


def test_the_page_is_what_the_script_makes_of_the_catalogue() -> None:
    before = (ROOT / "docs" / "errors.md").read_text()
    assert runpy.run_path(str(ROOT / "scripts" / "errors.py"))["page"](before, catalogue()) == before


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


def test_an_error_obeys_no_name_of_a_file_or_tensor() -> None:
    """Names come from files; a terminal would obey what they hold."""
    said = str(CheckpointError("IG936", seen="\x1b[2J of model/\x9b31mw", place="a\u202efolder"))
    assert all(c.isprintable() or c == "\n" for c in said), said
    assert r"\x1b[2J" in said
