"""A build gives the same bytes whoever makes it, however often it is killed; nothing is lost and nothing leaks."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isograd.data import Mixture, Source, Tokens, build, verify
from isograd.data.files import write_whole
from isograd.data.manifest import Recipe, encode, read
from isograd.data.shards import TOGETHER, ShardRecord, record_of, split_of
from isograd.errors import CheckpointError, DataError
from isograd.io.atomic import AtomicFile
from tests.data.toys import END, content, lines_file, toy, whole, words

LINES: dict[str, Any] = {"documents": "line", "validation": 0.3, "shard_bytes": 400}


def documents_of(folder: Path, split: str) -> list[str]:
    """Every document of a split of bytes, as text."""
    tokens, numbers = whole(folder, split)
    found: dict[int, list[int]] = {}
    for token, number in zip(tokens, numbers, strict=True):
        found.setdefault(number, []).append(token)
    assert all(ids[-1] == END and END not in ids[:-1] for ids in found.values())
    return [bytes(ids[:-1]).decode() for ids in found.values()]


def test_every_document_is_in_one_split_in_its_order_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = toy(tmp_path / "toy", 200, validation=0.3)
    texts = words(200)
    for split in ("train", "validation"):
        assert documents_of(folder, split) == [text for text in texts if split_of(text, 0.3) == split]
    assert len(read(folder).of("train")) > 3
    assert Tokens(folder).documents + Tokens(folder, "validation").documents == 200


def test_a_shard_of_which_not_all_landed_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAILURES E7: on a disk that says that a write succeeded, and loses its end."""
    monkeypatch.setattr(os, "fsync", lambda file: os.ftruncate(file, os.fstat(file).st_size // 2))
    with pytest.raises(CheckpointError, match=r"IG945: what was written is not what is read back"):
        write_whole(tmp_path / "train-00000.bin", bytes(100))
    assert not list(tmp_path.iterdir())


def test_a_text_is_on_one_side_wherever_it_stands_and_the_share_is_kept(tmp_path: Path) -> None:
    texts = words(40)
    (tmp_path / "one.txt").write_text("\n".join([*texts, *reversed(texts)]))
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build(tmp_path / "out", [tmp_path / "one.txt", tmp_path / "two.jsonl"], **LINES)
    train, validation = (set(documents_of(tmp_path / "out", split)) for split in ("train", "validation"))
    assert train | validation == set(texts)
    assert not train & validation
    assert [i for i in range(40) if split_of(f"text {i}", 0.2) == "validation"] == [8, 16, 23]  # in every version
    many = [split_of(str(i), 0.1) for i in range(5000)]
    assert abs(many.count("validation") - 500) < 85  # four standard deviations of 21


def test_the_manifest_hashes_what_lies_there_and_is_the_last_file(tmp_path: Path) -> None:
    folder = toy(tmp_path / "toy")
    manifest = read(folder)
    assert set(content(folder)) == {"manifest.json", *manifest.files()}
    for name, (size, digest) in manifest.files().items():
        raw = (folder / name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (size, digest)
    assert verify(folder) == manifest
    assert json.loads((folder / "manifest.json").read_bytes())["recipe"]["vocabulary"]["size"] == 257


def test_any_number_of_workers_makes_the_same_bytes(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "source.txt", 100)
    for workers in (1, 3):
        build(tmp_path / f"by{workers}", [source], **LINES, workers=workers)
    assert content(tmp_path / "by1") == content(tmp_path / "by3")
    assert len(content(tmp_path / "by1")) > 6


def test_a_build_that_is_killed_before_any_touch_of_the_disk_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.data.crash", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


def test_kill_9_of_a_build_with_workers_leaves_no_one_behind_and_the_next_call_finishes_it(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "source.txt", 600)
    command = [sys.executable, "-m", "isograd.cli.main", "data", "build", str(tmp_path / "out"), str(source)]
    command += ["--documents", "line", "--validation", "0.3", "--shard-bytes", "400", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "out" / "building-00003.json").exists():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.001)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(DataError, match="its build is not finished"):
        Tokens(tmp_path / "out")
    while any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.01)  # they end by themselves; the test's time limit says if they do not
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("train-*.bin")}
    assert kept
    build(tmp_path / "out", [str(source)], **LINES)
    build(tmp_path / "whole", [str(source)], **LINES)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    again = sum(path.stat().st_mtime_ns != at for path, at in kept.items())
    assert again <= 2, "only what was in work is made again"


def second_worker_dies(pipe: Connection, folder: Path, recipe: Recipe, tokenizer: str | None) -> None:
    if pipe.recv()[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)  # until it is stopped


def test_a_worker_that_dies_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, before = lines_file(tmp_path / "source.txt"), set(multiprocessing.active_children())
    monkeypatch.setattr("isograd.data.workers._serve", second_worker_dies)
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [source], **LINES, workers=2)
    assert caught.value.code == "IG921"
    assert set(multiprocessing.active_children()) <= before  # those of other tests go on


def test_nothing_unfinished_is_left_by_a_build_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "source.jsonl", tmp_path / "out"
    source.write_text(json.dumps({"text": "fine" * TOGETHER}) + "\n{broken\n")
    monkeypatch.setattr(AtomicFile, "discard", lambda self: None)  # as of a worker that was stopped
    with pytest.raises(DataError, match="line 2"):
        build(out, [source], validation=0)
    assert {path.name for path in out.iterdir()} == {"building.json"}


def test_a_worker_s_error_is_the_error_of_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text('{"text": "fine"}\n' * 50 + "{broken\n" + '{"text": "fine"}\n' * 50)
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            build(tmp_path / f"out{workers}", [source], shard_bytes=200, workers=workers)
        assert caught.value.code == "IG913"
        assert "line 51" in str(caught.value)


def test_a_finished_build_is_left_as_it_is_and_another_recipe_is_refused(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "source.txt")
    first = build(tmp_path / "out", [source], **LINES)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert build(tmp_path / "out", [source], **LINES, workers=3) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    for change in ({"validation": 0.5}, {"shard_bytes": 500}, {"documents": "blank"}, {"end_of_document": "10"}):
        with pytest.raises(DataError) as caught:
            build(tmp_path / "out", [source], **LINES | change)
        assert caught.value.code == "IG916", change


def unfinish(folder: Path) -> None:
    """As if it had been killed before its manifest."""
    manifest = read(folder)
    (folder / "building.json").write_bytes(encode(asdict(manifest.recipe)))
    for number in {shard.number for shard in manifest.shards}:
        shards = tuple(shard for shard in manifest.shards if shard.number == number)
        record_of(folder, number).write_bytes(encode(asdict(ShardRecord(shards, 0))))
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("change", ["none", "missing", "truncated", "no record", "broken record"])
def test_an_unfinished_build_keeps_what_has_a_record_and_makes_the_rest(tmp_path: Path, change: str) -> None:
    source, out = lines_file(tmp_path / "source.txt"), tmp_path / "out"
    build(out, [source], **LINES)
    expected = content(out)
    unfinish(out)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("train-*")}
    if change in ("missing", "truncated"):
        damaged(out, "train-00001.bin", change)
    elif change == "broken record":
        record_of(out, 1).write_text("{")
    elif change == "no record":
        record_of(out, 1).unlink()
    build(out, [source], **LINES)
    assert content(out) == expected
    again = {name for name, at in times.items() if (out / name).stat().st_mtime_ns != at}
    assert again == (set() if change == "none" else {"train-00001.bin", "train-00001.ends"})


def test_an_unfinished_build_refuses_inputs_that_changed(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "source.txt")
    build(tmp_path / "out", [source], **LINES)
    unfinish(tmp_path / "out")
    source.write_text(source.read_text() + "more\n")
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [source], **LINES)
    assert caught.value.code == "IG917"


def test_a_finished_build_says_what_to_remove_when_an_input_has_another_date(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "source.txt")
    build(tmp_path / "out", [source], **LINES)
    os.utime(source, ns=(0, 0))
    with pytest.raises(DataError, match=rf"IG917[\s\S]*restore the file; or remove {tmp_path / 'out'}, no more"):
        build(tmp_path / "out", [source], **LINES)


def test_an_input_that_is_mended_after_a_failed_build_is_welcome_as_long_as_nothing_was_done(tmp_path: Path) -> None:
    source, out = tmp_path / "source.jsonl", tmp_path / "out"
    source.write_text('{"text": "fine"}\n{broken\n')
    with pytest.raises(DataError, match="line 2"):
        build(out, [source], validation=0)
    (out / "validation-00000.bin").write_bytes(b"of a shard that was killed before its record")
    source.write_text('{"text": "fine"}\n{"text": "mended"}\n')
    build(out, [source], validation=0)
    build(tmp_path / "whole", [source], validation=0)
    assert content(out) == content(tmp_path / "whole")
    assert documents_of(out, "train") == ["fine", "mended"]


def test_an_unfinished_build_whose_recipe_is_broken_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "out", [lines_file(tmp_path / "source.txt")], **LINES)
    unfinish(tmp_path / "out")
    (tmp_path / "out" / "building.json").write_text("{")
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [tmp_path / "source.txt"], **LINES)
    assert caught.value.code == "IG916"


def test_a_folder_that_holds_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [lines_file(tmp_path / "source.txt")], **LINES)
    assert caught.value.code == "IG916"
    assert content(tmp_path / "out") == {"thesis.txt": b"mine"}


def test_two_builds_in_one_folder_are_refused(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [lines_file(tmp_path / "source.txt")], **LINES)
    os.close(descriptor)
    assert caught.value.code == "IG922"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_an_error_and_with_room_the_same_command_goes_on(tmp_path: Path, workers: str) -> None:
    """RLIMIT_FSIZE stands for the disk: no file may grow beyond 8 KiB, and -B writes no half of a module's bytecode."""
    source = lines_file(tmp_path / "source.txt", 900)
    options = ["--documents", "line", "--shard-bytes", "9000", "--workers", workers]
    module = [sys.executable, "-B", "-m", "isograd.cli.main"]
    command = [*module, "data", "build", str(tmp_path / "out"), str(source), *options]
    full = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "-", *command], capture_output=True, text=True, check=False
    )
    assert full.returncode == 1, full.stderr  # no mistake of the command's
    assert "IG918" in full.stderr
    assert "Traceback" not in full.stderr
    assert not list((tmp_path / "out").glob("*.tmp"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "out").files()


def test_a_folder_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "source.txt")
    with pytest.raises(DataError) as caught:
        build(source, [source])
    assert caught.value.code == "IG918"
    assert "exists" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("building.SHARDS", 3), ("building.LARGEST", 100)])
def test_more_than_a_manifest_can_list_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(f"isograd.data.{name}", value)
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [lines_file(tmp_path / "source.txt")], **LINES)
    assert caught.value.code == "IG909"
    assert not list((tmp_path / "out").glob("*.bin"))


def test_progress_counts_what_was_done_before_too(tmp_path: Path) -> None:
    source, out = lines_file(tmp_path / "source.txt"), tmp_path / "out"
    told: list[tuple[int, int, int]] = []
    build(out, [source], **LINES, progress=lambda *numbers: told.append(numbers))
    size, tokens = source.stat().st_size, Tokens(out).tokens + Tokens(out, "validation").tokens
    assert (told[0], told[-1]) == ((0, size, 0), (size, size, tokens))
    assert told == sorted(told)
    unfinish(out)
    record_of(out, 0).unlink()
    again: list[tuple[int, int, int]] = []
    build(out, [source], **LINES, progress=lambda *numbers: again.append(numbers))
    assert len(again) == 2
    assert 0 < again[0][0] < size
    assert again[-1] == told[-1]


def test_all_documents_for_validation_leave_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(next(str(i) for i in range(1000) if split_of(str(i), 0.5) == "validation"))
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [tmp_path / "one.txt"], validation=0.5)
    assert caught.value.code == "IG923"


def test_a_file_of_blank_lines_has_nothing_to_train_on_and_a_file_of_text_is_not_taken_for_tokens(
    tmp_path: Path,
) -> None:
    (tmp_path / "blank.txt").write_text("\n\n\n")
    with pytest.raises(DataError, match="no document with text"):
        build(tmp_path / "out", [tmp_path / "blank.txt"], **LINES)
    with pytest.raises(DataError, match=r"seen: +a file") as caught:
        Tokens(tmp_path / "blank.txt")
    assert f"isograd data build TOKENS {tmp_path / 'blank.txt'}" in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"documents": "page"}, {"validation": 1.0}, {"validation": -0.1}, {"workers": 0}, {"shard_bytes": 0}]
)
def test_options_outside_their_ranges_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        build(tmp_path / "out", [lines_file(tmp_path / "source.txt")], **options)
    assert caught.value.code == "IG924"
    assert not (tmp_path / "out").exists()


def test_without_an_end_of_document_the_ends_are_known_all_the_same(tmp_path: Path) -> None:
    texts = words(30)
    build(
        tmp_path / "out", [lines_file(tmp_path / "s.txt", 30)], documents="line", validation=0, end_of_document="none"
    )
    tokens, numbers = whole(tmp_path / "out")
    assert bytes(tokens).decode() == "".join(texts)
    assert numbers == [i for i, text in enumerate(texts) for _ in text.encode()]


def test_the_default_size_of_a_shard_keeps_the_number_of_shards_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isograd.data.building.SHARD", 10)
    monkeypatch.setattr("isograd.data.building.MOST", 4)
    build(tmp_path / "out", [lines_file(tmp_path / "source.txt", 200)], documents="line", validation=0)
    assert len(read(tmp_path / "out").shards) == 4
    assert verify(tmp_path / "out").recipe.shard_bytes > 1000


# -- reading what was damaged ------------------------------------------------------------------------------------


def damaged(folder: Path, name: str, change: str) -> None:
    path = folder / name
    raw = path.read_bytes()
    if change == "missing":
        path.unlink()
    elif change == "truncated":
        path.write_bytes(raw[:-1])
    elif change == "longer":
        path.write_bytes(raw + b"x")
    else:
        path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00001.ends"])
@pytest.mark.parametrize("change", ["missing", "truncated", "longer"])
def test_a_file_of_another_size_is_refused_when_the_folder_is_opened(tmp_path: Path, name: str, change: str) -> None:
    folder = toy(tmp_path / "toy")
    damaged(folder, name, change)
    for opened in (lambda: Mixture([Source(folder)], length=8, batch=2), lambda: verify(folder)):
        with pytest.raises(DataError) as caught:
            opened()
        assert caught.value.code == "IG902"
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00001.ends", "validation-00000.bin"])
def test_a_flipped_bit_is_found_by_verify(tmp_path: Path, name: str) -> None:
    folder = toy(tmp_path / "toy")
    damaged(folder, name, "flipped")
    with pytest.raises(DataError) as caught:
        verify(folder)
    assert caught.value.code == "IG903"
    assert name in str(caught.value)


def test_a_file_that_is_cut_short_during_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = toy(tmp_path / "toy", 20, validation=0)
    mixture = Mixture([Source(folder)], length=8, batch=64)
    for path in folder.glob("*.bin"):
        os.truncate(path, 2)
    with pytest.raises(DataError) as caught:
        mixture.rows(0, range(64))
    assert caught.value.code == "IG904"
    assert ".bin" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "raw"),
    [
        ("IG901", b""),
        ("IG901", b"\xff\xfe"),
        ("IG901", b"[" * 200_000),
        ("IG901", b'{"format": "other"}'),
        ("IG901", b'{"format": "isograd tokens", "version": 2}'),
        ("IG901", b'{"format": "isograd tokens", "version": 1, "shards": 3}'),
        ("IG900", None),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(tmp_path: Path, code: str, raw: bytes | None) -> None:
    if raw is not None:
        (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError) as caught:
        Tokens(tmp_path)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("shards", 0, "tokens"), -1),
        (("shards", 0, "tokens"), True),
        (("shards", 0, "split"), "../train"),
        (("shards", 0, "number"), "0"),
        (("shards", 0, "tokens_sha256"), "x"),
        (("shards", 1, "number"), 0),
        (("recipe", "vocabulary", "size"), 0),
        (("recipe", "surprise"), 1),
    ],
)
def test_each_field_of_a_manifest_is_checked(tmp_path: Path, place: tuple[str | int, ...], value: Any) -> None:
    folder = toy(tmp_path / "toy")
    record = json.loads((folder / "manifest.json").read_bytes())
    inside = record
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(DataError) as caught:
        Tokens(folder)
    assert caught.value.code == "IG901"


def test_a_manifest_larger_than_any_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isograd.data.manifest.LARGEST", 100)
    with pytest.raises(DataError, match=r"(?s)IG901.*too large"):
        Tokens(toy(tmp_path / "toy"))


def test_a_split_without_documents_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Tokens(toy(tmp_path / "toy", validation=0), "validation")
    assert caught.value.code == "IG905"


def test_above_65536_tokens_in_the_vocabulary_numbers_take_four_bytes() -> None:
    from isograd.data.manifest import Vocabulary

    assert np.dtype(Vocabulary("a", None, 65_536, None).dtype).itemsize == 2
    assert np.dtype(Vocabulary("a", None, 65_537, None).dtype).itemsize == 4
