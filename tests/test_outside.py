"""Files from outside: regular, bounded, typed; whatever is in them, the answer is a value or one IsogradError."""

from __future__ import annotations

import json
import os
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isograd.checkpoint import folder
from isograd.errors import IsogradError
from isograd.io import atomic, no_follow, untrusted, yaml_reader
from isograd.io.untrusted import FileError
from isograd.train import run_folder
from tests import fuzz


def fifo(path: Path) -> None:
    os.mkfifo(path)


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (fifo, "a FIFO"),
    "a directory": (Path.mkdir, "a directory"),
    "a link": (lambda p: p.symlink_to("/dev/null"), "a symbolic link"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), "a symbolic link"),
    "nothing": (lambda p: None, "No such file"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """FAILURES B7: a FIFO or /dev/zero as a manifest did not return."""
    make, said = SPECIAL[kind]
    make(tmp_path / "file")
    with pytest.raises(FileError, match=said) as caught:
        untrusted.read_bytes(tmp_path / "file", 100)
    assert caught.value.code == "IG660"
    assert str(tmp_path / "file") in str(caught.value)


def test_a_device_behind_a_link_that_may_be_followed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(FileError, match="a device"):
        untrusted.read_bytes(tmp_path / "zero", 100, follow=True)
    (tmp_path / "real").write_text("12")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert untrusted.read_json(tmp_path / "link", 100, follow=True) == 12


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[" * 70 + "]" * 70, "more than 64 deep"),
        ("[" * 100_000, "inside each other"),
        ("[NaN]", "NaN"),
        ("[1e999]", "too large"),
        ("9" * 5000, "digits"),
        ('["\\ud800"]', "surrogate pair"),
        ("[1", "delimiter"),
        ("version https://git-lfs.github.com/spec/v1\n", "seen:"),
    ],
)
def test_json_that_another_reader_would_take_otherwise_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        untrusted.read_json(path, 1 << 20)
    assert said in str(caught.value)
    assert caught.value.code in ("IG662", "IG665")
    with pytest.raises(FileError, match="IG661"):
        untrusted.read_json(path, len(text) - 1)


def test_a_sparse_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="IG661"):
            untrusted.read_bytes(path, 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def header(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = json.loads(raw[8 : 8 + size])
    change(found)
    text = json.dumps(found).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h["a"].update(dtype="F31"), "dtype 'F31'"),
        (lambda h: h["a"].update(shape=[2, 4]), "24 bytes for [2, 4] of F32"),
        (lambda h: h["a"].update(shape=[2, -3]), "shape [2, -3]"),
        (lambda h: h["a"].update(shape=[1 << 40, 1 << 40]), "shape"),
        (lambda h: h["a"].update(shape="23"), "shape '23'"),
        (lambda h: h["a"].update(data_offsets=[4, 28]), "begins at byte 4"),
        (lambda h: h["b"].update(data_offsets=[0, 8]), "begins at byte"),
        (lambda h: h.pop("b"), "tensors of 24 bytes in all, in a file with 32"),
        (lambda h: h.update(__metadata__=[1]), "__metadata__"),
        (lambda h: h.update(a=3), "tensor 'a': 3"),
    ],
)
def test_a_safetensors_header_that_lies_is_named(tmp_path: Path, change: Callable[..., object], said: str) -> None:
    """FAILURES B7: headers that lie were raw tracebacks without the file's name."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(2)}, path)
    assert untrusted.read_header(path)["a"].shape == (2, 3)
    header(path, change)
    with pytest.raises(FileError) as caught:
        untrusted.read_header(path)
    assert (caught.value.code, said in str(caught.value)) == ("IG664", True), str(caught.value)
    assert str(path) in str(caught.value)


def test_two_thousand_damaged_files_end_in_a_value_or_an_error_and_write_nothing() -> None:
    """FAILURES B7. tests/fuzz.py says what is changed; by hand: python -m tests.fuzz 100000."""
    said = list[str]()
    assert fuzz.run(range(2000), said.append) == 0, "\n".join(said[:5])


@pytest.mark.medium
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_each_reader_answers_mutations_with_a_value_or_an_error(target: str) -> None:
    """A second each; ISOGRAD_FUZZ_SECONDS says how long instead (`make fuzz`, in CI: 30)."""
    wrong = fuzz.run_for(target, float(os.environ.get("ISOGRAD_FUZZ_SECONDS", "1")), seed=1_000_000)
    assert not wrong, "\n".join(wrong[:5])


def test_a_parquet_file_that_pyarrow_ends_the_process_for_is_refused(tmp_path: Path) -> None:
    """Its C++ throws where a column's description contradicts itself, and Python does not expect it."""
    fuzzer = fuzz.Fuzzer(tmp_path, ["parquet"])
    seed = 1_001_170  # flips bits of the description of a column
    _, raised = fuzzer.once(seed, "parquet")
    assert raised is None  # a value or an IsogradError


def test_the_fuzzer_sees_a_reader_that_raises_hangs_or_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes(folder: Path) -> None:
        (folder / "new").write_text("x")

    def raises(folder: Path) -> None:
        json.loads((folder / "lock").read_text())["job"].lower()

    def hangs(folder: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT", 0.05)
    for read in (writes, raises, hangs):
        monkeypatch.setattr(fuzz, "TARGETS", {"lock": fuzz.Target(fuzz._lock, read)})
        assert fuzz.run(range(30, 40), lambda _: None) > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [1]\nb: *a", "line 2: aliases"),
        ("a:\n  <<: {b: 1}", "line 2: merge keys"),
        ("a: .inf", "line 1: .inf"),
        ("a: -.INF", "finite"),
        ("a: .nan", "finite"),
        ("a: 010", "line 1: 010: a number that begins with 0 is octal"),
        ("a: 1:30", "base 60"),
        ("a: !!binary aGk=", "the tag !!binary"),
        ("a: " + "[" * 40, "inside each other"),
    ],
)
def test_yaml_that_people_read_otherwise_is_refused_with_its_line(text: str, said: str) -> None:
    """FAILURES B6: an alias bomb did not return; '<<' "is not YAML"; .inf, 010 and 1:30 were accepted."""
    with pytest.raises(ValueError, match="line") as caught:
        yaml_reader.parse(text)
    assert said in str(caught.value)


def test_yaml_reads_what_people_mean() -> None:
    found = yaml_reader.parse(
        "a: 1e-3\nb: '010'\nc: 2026-01-31\nd: 10\ne: [true, null, 0x1f, 1_000, 0, -0.5]\nf: '1:30'"
    )
    assert found == {
        "a": 1e-3, "b": "010", "c": "2026-01-31", "d": 10, "e": [True, None, 31, 1000, 0, -0.5], "f": "1:30",
    }  # fmt: skip


# -- inside a folder that is written into ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["w", "wb", "a", "a+"])
def test_a_writer_follows_no_link_and_keeps_other_names_of_a_file(tmp_path: Path, mode: str) -> None:
    """FAILURES B5."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "soft").symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    os.mkfifo(tmp_path / "fifo")
    for name in ("soft", "hard", "fifo"):
        with pytest.raises(IsogradError, match=f"IG666.*{name}"):
            no_follow.open_to_write(tmp_path / name, mode)
    assert victim.read_text() == "untouched"
    atomic.replace_text(tmp_path / "plain", "long text")
    atomic.replace_text(tmp_path / "plain", "short")
    assert (tmp_path / "plain").read_text() == "short"
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) & 0o600 == 0o600


def test_a_folder_with_a_link_at_any_depth_is_refused_and_one_that_is_a_link_is_not(tmp_path: Path) -> None:
    home = tmp_path / "run"
    (home / "a" / "b").mkdir(parents=True)
    (home / "a" / "b" / "file").touch()
    (tmp_path / "link").symlink_to(home)
    no_follow.no_links(tmp_path / "link")
    no_follow.no_links(tmp_path / "not there yet")
    (home / "a" / "b" / "soft").symlink_to("/nowhere")
    with pytest.raises(IsogradError, match=r"IG666.*soft"):
        no_follow.no_links(tmp_path / "link")


def hard(path: Path) -> None:
    victim = path.parents[2] / "victim"
    victim.touch()
    os.link(victim, path)


@pytest.mark.parametrize(("made", "seen"), [(hard, "2 names"), (fifo, "a FIFO")])
@pytest.mark.parametrize("place", ["metrics.jsonl", "checkpoints/lock", "stalled/rank-00000.json"])
def test_a_second_name_or_a_fifo_in_a_runs_folder_is_refused_at_its_start(
    tmp_path: Path, place: str, made: Callable[[Path], None], seen: str
) -> None:
    """FAILURES E16: only when it was written into."""
    home = tmp_path / "run"
    (home / place).parent.mkdir(parents=True, exist_ok=True)
    made(home / place)
    with pytest.raises(IsogradError, match=rf"IG666.*{place}(.|\n)*{seen}"):
        run_folder.make_folder(home)


def test_files_of_a_finished_checkpoint_may_have_other_names(tmp_path: Path) -> None:
    """As a backup by hard links gives them: a run only renames and removes such a folder."""
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    os.link(step / "manifest.json", tmp_path / "backup")
    run_folder.make_folder(tmp_path / "run")
    os.mkfifo(step / "fifo")
    with pytest.raises(IsogradError, match=r"IG666(.|\n)*a FIFO"):
        run_folder.make_folder(tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (fifo, "a FIFO"),
        (lambda p: p.symlink_to(p), "a symbolic link that leads in a circle"),
        (lambda p: p.symlink_to("nowhere"), "a symbolic link to 'nowhere', which is not there"),
        (lambda p: None, "no such folder"),
    ],
    ids=["a fifo", "a circle", "a lost link", "nothing"],
)
def test_what_stands_where_a_folder_was_wanted_is_named(
    tmp_path: Path, make: Callable[[Path], None], seen: str
) -> None:
    make(tmp_path / "run")
    with pytest.raises(IsogradError, match=rf"IG935(.|\n)*{seen}"):
        folder.one_of(tmp_path / "run")
