"""What was written is read back; what is not whole is refused with its code, a sentence, and the file's name."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd_verify.command import main
from isograd_verify.errors import VerifyError
from isograd_verify.record import events, recording
from isograd_verify.record.events import Backward, Collective, End
from isograd_verify.record.recording import RankWriter, Recording, write_json

from .recordings import Held, Step, numbers, write


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A recording of two ranks and two steps."""
    weight, bias = numbers(5, 3), numbers(5, seed=1)
    held = {"a.weight": Held(weight, weight * 2, parts={0: weight, 1: weight}), "a.bias": Held(bias, None)}
    write(tmp_path / "it", [[Step(held), Step(held)]] * 2, layout="dp2")
    return tmp_path / "it"


def test_what_was_written_is_read_back(home: Path) -> None:
    found = Recording(home)
    assert found.world == 2
    assert found.about == {"version": recording.VERSION, "layout": "dp2"}
    assert found.steps == [1, 2]
    assert [record.rank for record in found.ranks] == [0, 1]
    assert all(record.about["finished"] for record in found.ranks)
    assert [event.micro for event in found.ranks[1].of(Backward)] == [0, 1, 0, 1]
    assert torch.equal(found.ranks[1].tensors(2)["final/a.weight"], numbers(5, 3) * 2)
    assert set(found.ranks[0].group(1, "parameter")) == {"a.weight", "a.bias"}
    assert set(found.ranks[0].group(1, "final")) == {"a.weight"}
    held = found.ranks[1].of(events.Step)[0].parameters
    assert (held["a.bias"].gradient, held["a.weight"].shape) == (False, (5, 3))


def test_tensors_of_every_kind_come_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = {
        "strided": numbers(7, 5).T,
        "half": numbers(9, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 3),
        "tokens": torch.arange(11),
        "nan": torch.tensor([torch.nan, -torch.inf]),
    }
    writer = RankWriter(tmp_path, 0, 1)
    writer.tensors(3, tensors)
    writer.close()
    found = Recording(tmp_path).ranks[0].tensors(3)
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name


def test_the_end_of_a_collective_is_folded_into_it(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, 1)
    first, second = (Collective(n=n, op="all_reduce", group=(0,)) for n in (1, 2))
    for event in (first, second, End(n=1, seconds=0.25)):
        writer.event(event)
    writer.event(End(n=99, seconds=1.0))  # of a collective that began before the recording
    writer.close()
    assert Recording(tmp_path).ranks[0].events == [replace(first, seconds=0.25), second]


def test_a_rank_that_never_closed_is_read_and_known_as_unfinished(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, 1)
    writer.event(Backward(1, 0))
    found = Recording(tmp_path).ranks[0]
    assert found.about["finished"] is False
    assert len(found.events) == 1
    writer.close()


def test_steps_are_those_that_every_rank_has(home: Path) -> None:
    (home / "rank-0001" / "step-0002.safetensors").unlink()
    assert Recording(home).steps == [1]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "about.json", {"version": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "about.json", {"version": object()})
    assert json.loads((tmp_path / "about.json").read_text()) == {"version": 1}


# -- what cannot be read -------------------------------------------------------------------------------------------


def cut(path: Path, share: float = 0.6) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


Damage = Callable[[Path], object]
DAMAGED: dict[str, tuple[Damage, str, str]] = {
    "events cut in the middle of a line": (lambda h: cut(h / "rank-0001/events.jsonl"), "IG715", "rank-0001"),
    "events without their last newline": (lambda h: cut(h / "rank-0001/events.jsonl", 0.99999), "IG715", "rank-0001"),
    "events that are missing": (lambda h: (h / "rank-0000/events.jsonl").unlink(), "IG715", "events.jsonl"),
    "an event that is no object": (lambda h: append(h / "rank-0000/events.jsonl", "[1]\n"), "IG715", "rank-0000"),
    "an event without its kind": (lambda h: append(h / "rank-0000/events.jsonl", '{"n":1}\n'), "IG715", "line 7"),
    "an event of an unknown kind": (lambda h: append(h / "rank-0000/events.jsonl", '{"k":"x"}\n'), "IG715", "line 7"),
    "a field of another type": (
        lambda h: append(h / "rank-0000/events.jsonl", '{"k":"End","n":"1","seconds":2}\n'), "IG715", "n is '1'",
    ),
    "a field that is not known": (
        lambda h: append(h / "rank-0000/events.jsonl", '{"k":"Start","color":1}\n'), "IG715", "unknown ['color']",
    ),
    "an end of nothing": (lambda h: append(h / "rank-0000/events.jsonl", '{"k":"End"}\n'), "IG715", "rank-0000"),
    "events nested without end": (
        lambda h: append(h / "rank-0000/events.jsonl", "[" * 200_000 + "\n"), "IG715", "rank-0000",
    ),
    "events that are no text": (
        lambda h: (h / "rank-0000/events.jsonl").write_bytes(b"\xff\xfe\n"), "IG715", "rank-0000",
    ),
    "a cut rank.json": (lambda h: cut(h / "rank-0001/rank.json"), "IG716", "rank-0001"),
    "a rank.json that is a list": (lambda h: (h / "rank-0001/rank.json").write_text("[]"), "IG716", "rank-0001"),
    "a rank.json that does not say its rank": (
        lambda h: (h / "rank-0001/rank.json").write_text('{"version": 1}'), "IG716", "rank-0001",
    ),
    "a rank.json that is missing": (lambda h: (h / "rank-0001/rank.json").unlink(), "IG716", "rank-0001"),
    "a newer version": (lambda h: change(h / "rank-0001/rank.json", version=5), "IG714", "rank-0001"),
    "an older version": (lambda h: change(h / "rank-0001/rank.json", version=1), "IG714", "rank-0001"),
    "a version that is no number": (lambda h: change(h / "rank-0000/rank.json", version="x"), "IG716", "rank-0000"),
    "a missing rank": (lambda h: shutil.rmtree(h / "rank-0000"), "IG713", "ranks [1]"),
    "a missing last rank": (lambda h: shutil.rmtree(h / "rank-0001"), "IG713", "ranks [0]"),
    "two ranks of one name": (lambda h: change(h / "rank-0001/rank.json", rank=0), "IG713", "ranks [0, 0]"),
    "no rank": (lambda h: [shutil.rmtree(r) for r in h.glob("rank-*")], "IG712", "holds no rank"),
    "no directory": (shutil.rmtree, "IG711", "no recording at"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_recording_is_refused_with_the_file_named(home: Path, damage: str) -> None:
    harm, code, named = DAMAGED[damage]
    harm(home)
    with pytest.raises(VerifyError) as error:
        Recording(home)
    assert error.value.code == code
    assert named in str(error.value)
    assert error.value.fix, "an error teaches how to mend it"


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_damaged_recording_json_is_refused(home: Path, text: str) -> None:
    (home / "recording.json").write_text(text)
    with pytest.raises(VerifyError, match=r"IG716: recording\.json"):
        _ = Recording(home).about


TORN: dict[str, Damage] = {
    "cut in its tensors": lambda p: cut(p, 0.8),
    "cut in its header": lambda p: cut(p, 0.05),
    "empty": lambda p: p.write_bytes(b""),
    "missing": Path.unlink,
    "a header that promises too much": lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]),
}


@pytest.mark.parametrize("damage", TORN)
def test_tensors_that_cannot_be_read_are_refused_with_the_file_named(home: Path, damage: str) -> None:
    found = Recording(home)
    TORN[damage](home / "rank-0001" / "step-0002.safetensors")
    with pytest.raises(VerifyError) as error:
        found.ranks[1].tensors(2)
    assert error.value.code == "IG717"
    assert "step-0002.safetensors of rank-0001" in str(error.value)
    assert len(found.ranks[1].tensors(1)) > 0, "the other step can still be read"


# -- reading is bounded and runs nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "value", "code"),
    [("MOST_EVENTS", 3, "IG715"), ("LONGEST_LINE", 40, "IG715"), ("LONGEST_JSON", 9, "IG716")],
)
def test_files_beyond_the_limits_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, code: str
) -> None:
    assert Recording(home).world == 2
    monkeypatch.setattr(recording, limit, value)
    with pytest.raises(VerifyError, match=code):
        Recording(home)


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["step-0001.safetensors", "events.jsonl", "rank.json"])
def test_a_pickle_in_place_of_any_file_is_refused_and_not_run(home: Path, tmp_path: Path, file: str) -> None:
    sprung = tmp_path / "sprung"
    (home / "rank-0000" / file).write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(VerifyError, match=r"IG71[567]"):
        Recording(home).ranks[0].tensors(1)
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists(), "the trap works"


def test_no_file_of_the_verifier_imports_a_pickler() -> None:
    picklers = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    found = set()
    for path in Path(recording.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {(path.name, name) for name in names if name.split(".")[0] in picklers}
            if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) == "torch":
                found.add((path.name, "torch.load"))
    assert found == set()


def test_recordings_of_several_nodes_are_put_together_and_judged(tmp_path: Path, capsys: Any) -> None:  # V17
    value, gradient = numbers(4, 3), numbers(4, 3, seed=1)
    held = [[Step({"w": Held(value, gradient, parts={0: gradient})})] for _ in range(2)]
    write(tmp_path / "one", held)
    for rank in range(2):
        part = tmp_path / f"node-{rank}"
        shutil.copytree(tmp_path / "one", part)
        shutil.rmtree(part / f"rank-{1 - rank:04d}")
        with pytest.raises(VerifyError, match="IG713"):
            Recording(part)
    parts = [str(tmp_path / "node-0"), str(tmp_path / "node-1")]
    main(["merge", str(tmp_path / "whole"), *parts])
    assert Recording(tmp_path / "whole").world == 2
    assert "(2 ranks)" in capsys.readouterr().out
    assert main(["merge", str(tmp_path / "whole"), *parts]) == 2
    assert main(["merge", str(tmp_path / "again"), parts[0], parts[0]]) == 2
    assert "IG728" in capsys.readouterr().err
