"""A save is there whole or not at all: killed at any phase, without space, without permission, beside another job."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from xxhash import xxh3_128

from isograd.checkpoint import CheckpointManager, files, folder
from isograd.checkpoint.files import entry
from isograd.checkpoint.manifest import Damage, merge
from isograd.checkpoint.read import Reader
from isograd.checkpoint.write import PHASES, Copied, SaveJob, Writing
from isograd.errors import CheckpointError, EngineError, LaunchError
from isograd.io import atomic
from tests.checkpoint import toys
from tests.engine.toys import assert_same_bits

ROWS = 6


def value(step: int, rank: int) -> torch.Tensor:
    return torch.arange(ROWS * 5.0).view(ROWS, 5) + 100 * step + 1000 * rank


def job(home: Path, step: int, rank: int, phase: Callable[[str], None], keep_last: int = 2) -> SaveJob:
    """One rank of two, with one tensor: each holds half of its rows."""
    box = ((ROWS * rank, ROWS * (rank + 1)), (0, 5))
    copies = [Copied("model/weight", (2 * ROWS, 5), box, value(step, rank))]
    copies += [Copied("model/bias", (), ((0, 1),), torch.tensor([float(step)]))] if rank == 1 else []
    run = {"groups": [{"kind": "SGD", "options": {}, "names": ["weight"]}], "counters": {}, "loss_scale": None}
    head = {"step": step, "layout": "dp2", "model": None, "extra": {"step": step}, "run": run}
    return SaveJob(home, folder.partial(home, step, "j"), step, rank, 2, head, copies, {}, keep_last, None, phase)


def both(home: Path, step: int, phases: tuple[Callable[[str], None], ...] = (lambda _: None, lambda _: None)) -> None:
    """What two ranks do, in threads of this process."""
    writing = [Writing(job(home, step, rank, phases[rank])) for rank in range(2)]
    for one in writing:
        one.join()
        if one.error is not None:
            raise one.error


def ends_at(phase: str) -> Callable[[str], None]:
    def end(now: str) -> None:
        if now == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    return end


def armed_rank(home: Path, rank: int, phase: str) -> None:
    """A process that is killed there."""
    Writing(job(home, 2, rank, ends_at(phase))).join()
    os._exit(7)


def whole(place: Path, step: int) -> bool:
    reader = Reader(place)
    expected = torch.cat([value(step, 0), value(step, 1)])
    return torch.equal(reader.read("model/weight"), expected) and float(reader.read("model/bias")) == step


OF_EACH = ("begun", "half written", "written", "recorded")
KILLS = [(0, phase) for phase in PHASES if phase != "copied"] + [(1, phase) for phase in OF_EACH]


@pytest.mark.medium
@pytest.mark.parametrize(("rank", "phase"), KILLS)
def test_a_rank_that_is_killed_at_any_phase_leaves_a_whole_checkpoint(tmp_path: Path, phase: str, rank: int) -> None:
    both(tmp_path, 1)
    armed = multiprocessing.get_context("fork").Process(target=armed_rank, args=(tmp_path, rank, phase))
    armed.start()
    other = Writing(job(tmp_path, 2, 1 - rank, lambda _: None))
    armed.join()
    assert armed.exitcode == -signal.SIGKILL
    if phase in OF_EACH[:3]:
        other.given_up.set()  # as a process group does that has lost a member
    other.join()
    complete = phase in ("named", "pruned") or (rank, phase) == (1, "recorded")
    found = folder.checkpoints(tmp_path)
    assert [step for step, _ in found] == ([1, 2] if complete else [1])
    assert all(whole(place, step) for step, place in found)
    folder.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [place.name for _, place in found]
    both(tmp_path, 3)
    assert whole(folder.checkpoints(tmp_path)[-1][1], 3)


def killed_run(home: Path, layout: str, rank: int, phase: str) -> None:
    """Trains, saves step 1, and is killed while it saves step 2."""
    engine = toys.engine_of(layout)
    armed = [False]

    def end(now: str) -> None:
        if armed[0] and now == phase and engine.mesh.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    with CheckpointManager(home, engine, phase=end) as keeper:
        for step in (1, 2):
            toys.train(engine, step - 1, step, gradients=False)
            keeper.save(step)
            keeper.wait()
            armed[0] = True


def never_killed_and_resumed(home: Path, layout: str, start: int) -> tuple[toys.Run, toys.Run]:
    engine = toys.engine_of(layout)
    toys.train(engine, 0, start, gradients=False)
    return toys.train(engine, start, 3), toys.resume(home, layout, stop=3)


@pytest.mark.parametrize(("rank", "phase", "goes_on_from"), [(1, "half written", 1), (0, "named", 2)])
def test_a_run_that_was_killed_goes_on_with_the_same_bits(
    worlds, tmp_path: Path, rank: int, phase: str, goes_on_from: int
) -> None:
    with pytest.raises(LaunchError, match="SIGKILL"):
        worlds(2).run(killed_run, tmp_path, "dp2 zero1", rank, phase)
    truth, found = worlds(2).run(never_killed_and_resumed, tmp_path, "dp2 zero1", goes_on_from)[0]
    assert found.start == goes_on_from
    assert (found.losses, found.norms) == (truth.losses, truth.norms)
    for mine, theirs in zip(found.gradients, truth.gradients, strict=True):
        assert_same_bits(mine, theirs)


# -- what the file system refuses ------------------------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing more fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(home: Path) -> tuple[str, list[str], list[float]]:
    """Only rank 1 has no space; saving goes on when it has some again."""
    engine = toys.engine_of("dp2 zero1", "gpt2")
    with CheckpointManager(home, engine) as keeper:
        keeper.save(1)
        keeper.wait()
        with largest_file(20_000 if engine.mesh.rank == 1 else resource.RLIM_INFINITY):
            keeper.save(2)
            with pytest.raises(CheckpointError) as error:
                keeper.wait()
        names = sorted(p.name for p in home.iterdir())
        run = toys.train(engine, 0, 1, gradients=False)
        keeper.save(3)
    return str(error.value), names, run.losses


def test_a_full_disk_is_an_error_on_all_ranks_and_training_can_go_on(worlds, tmp_path: Path) -> None:
    answers = worlds(2).run(full_disk, tmp_path)
    assert answers[0] == answers[1]
    error, names, _ = answers[0]
    assert "IG930: writing the checkpoint of step 2" in error
    assert os.strerror(errno.EFBIG) in error
    assert "rank 1" in error
    assert names == ["lock", "step-00000001"]
    assert [step for step, _ in folder.checkpoints(tmp_path)] == [1, 3]


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name() -> None:
    with pytest.raises(CheckpointError, match="IG930: opening the folder /proc/isograd"):
        CheckpointManager("/proc/isograd", toys.engine_of("1"))


def test_a_second_job_in_one_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    engine = toys.engine_of("1")
    with CheckpointManager(tmp_path, engine), pytest.raises(CheckpointError, match=f'IG931(.|\n)*"pid": {os.getpid()}'):
        CheckpointManager(tmp_path, engine)
    CheckpointManager(tmp_path, engine).close()


def test_ranks_that_see_different_folders_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "job_in", lambda _: "another")
    with pytest.raises(CheckpointError, match="IG932"):
        CheckpointManager(tmp_path, toys.engine_of("1"))


def mistaken(home: Path) -> list[str]:
    engine = toys.engine_of("dp2")
    said = []
    with CheckpointManager(home, engine) as keeper:
        for attempt in (lambda: keeper.save(engine.mesh.rank), lambda: keeper.save(1, {"a": object()})):
            with pytest.raises(CheckpointError) as error:
                attempt()
            said.append(str(error.value))
        toys.train(engine, 0, 1, gradients=False)
        engine.accumulate(toys.batch(1, engine.mesh), 2)
        with pytest.raises(CheckpointError) as error:
            keeper.save(1)
        said.append(str(error.value))
    return said


def test_saving_at_the_wrong_moment_is_refused(worlds, tmp_path: Path) -> None:
    for rank, said in enumerate(worlds(2).run(mistaken, tmp_path)):
        assert "IG933" in said[0] and f"rank {rank}: step {rank}" in said[0]
        assert "IG934" in said[1]
        assert "IG933" in said[2] and "with gradients under way" in said[2]


@pytest.mark.parametrize("step", [-1, 1.5, "1"])
def test_a_step_that_is_no_count_is_refused(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path, toys.engine_of("1")) as keeper, pytest.raises(CheckpointError, match="IG933"):
        keeper.save(step)


def test_a_number_of_numpy_is_a_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, toys.engine_of("1")) as keeper:
        keeper.save(numpy.int64(3))
        keeper.wait()
    assert (tmp_path / "step-00000003").is_dir()


def test_what_is_no_engine_and_no_number_of_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Linear"):
        CheckpointManager(tmp_path, nn.Linear(3, 3))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"IG930(.|\n)*'str' object"):
        CheckpointManager(tmp_path, toys.engine_of("1"), keep_last="3")  # type: ignore[arg-type]


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    engine = toys.engine_of("1", "gpt2")
    toys.train(engine, 0, 1, gradients=False)
    master = engine.optimizer.param_groups[0]["params"][0]
    with CheckpointManager(tmp_path, engine) as keeper:
        engine.optimizer.state[master]["row_factor"] = object()
        with pytest.raises(EngineError, match=r"IG540(.|\n)*'row_factor' of 'embed.weight': a object"):
            keeper.save(1)
    with pytest.raises(CheckpointError, match=r"IG941(.|\n)*complex64"):
        entry("phase", torch.ones(2, dtype=torch.complex64))


def test_rows_that_no_rank_wrote_make_no_checkpoint() -> None:
    note = {"file": "a", "bytes": 1, "tensors": {"model/w": [[4, 2], "F32", [[0, 3], [0, 2]], "00"]}, "counts": {}}
    with pytest.raises(CheckpointError, match=r"IG940(.|\n)*model/w: 6 of 8 elements"):
        merge([note], {})


# -- a disk that lies: FAILURES E7 ------------------------------------------------------------------------------------


def only(what: str, change: Callable[[bytes], bytes]) -> Callable[[str, bytes], bytes]:
    return lambda path, data: change(data) if what in path else data


LIES: dict[str, tuple[Callable[[str, bytes], bytes], str]] = {
    "nothing lands": (lambda path, data: b"", "IG945(.|\n)*0 bytes instead of"),
    "the end of a tensor is lost": (only("rank-00001.safetensors", lambda d: d[: len(d) // 2]), "bytes instead of"),
    "a bit is flipped in a tensor": (
        only("rank-00000.safetensors", lambda d: d if d[8:9] == b"{" else b"\x01" + d[1:]),
        "other bytes of 'model/weight'",
    ),
    "the header is zeros": (only("safetensors", lambda d: bytes(len(d)) if d[8:9] == b"{" else d), "another header"),
    "a record is lost": (only("rank-00001.json", lambda d: b""), "rank-00001.json"),
    "the manifest is lost": (only("manifest.json", lambda d: b""), "manifest.json"),
    "the manifest is zeros": (only("manifest.json", lambda d: bytes(len(d))), "manifest.json"),
    "its hash is lost": (only("manifest.sha256", lambda d: b""), "manifest.sha256"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_write_of_which_nothing_lands_gives_no_name_and_prunes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    both(tmp_path, 1)
    change, said = LIES[lie]
    for module in (files, atomic):
        monkeypatch.setattr(module, "open_to_write", toys.lying_disk(change))
    writing = [Writing(job(tmp_path, 2, rank, lambda _: None, keep_last=1)) for rank in range(2)]
    if lie in ("nothing lands", "the end of a tensor is lost", "a record is lost", "the header is zeros"):
        writing[1].join()
        writing[0].given_up.set()  # as the keeper does that hears of rank 1's error
    for one in writing:
        one.join()
    errors = [str(one.error) for one in writing if one.error is not None]
    assert any(re.search(said, error) for error in errors), errors
    assert [(step, whole(place, step)) for step, place in folder.checkpoints(tmp_path)] == [(1, True)]


@pytest.mark.parametrize("lie", ["none", "a bit is flipped", "a write is lost", "a flush fails"])
def test_a_file_of_many_blocks_is_read_again_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """What fails in the thread that reads is raised, and nothing is written behind it for long."""
    monkeypatch.setattr(files, "CHUNK", 5000)  # no multiple of a page
    monkeypatch.setattr(files, "MOST", 20_000)
    tensors = {name: torch.randn(size) for name, size in (("a", 40_000), ("b", 3), ("c", 7), ("d", 20_000))}
    entries = files.in_order(entry(name, tensor) for name, tensor in tensors.items())
    writes, fsync = [0], os.fsync

    def change(path: str, data: bytes) -> bytes:
        writes[0] += 1
        if writes[0] == 9 and lie == "a bit is flipped":
            return data[:100] + bytes([data[100] ^ 4]) + data[101:]
        return b"" if writes[0] == 9 and lie == "a write is lost" else data

    def failing(descriptor: int) -> None:
        if writes[0] >= 9 and lie == "a flush fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(files, "open_to_write", toys.lying_disk(change))
    monkeypatch.setattr(os, "fsync", failing)
    path = tmp_path / "x.safetensors"
    if lie != "none":
        with pytest.raises(OSError if lie == "a flush fails" else CheckpointError, match=r"IG945|Errno 5"):
            files.write_tensors(path, entries, (tensors[e.name] for e in entries), {})
        assert writes[0] < 40  # of 50
        return
    size, hashes = files.write_tensors(path, entries, (tensors[e.name] for e in entries), {})
    assert size == path.stat().st_size
    assert all(torch.equal(tensors[name], found) for name, found in load_file(path).items())
    assert hashes == {name: xxh3_128(files.raw_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}


def test_a_file_that_is_cut_while_it_is_read_is_damage(tmp_path: Path) -> None:
    both(tmp_path, 1)
    reader = Reader(folder.checkpoints(tmp_path)[0][1])
    reader.read("model/weight", ((0, 1), (0, 5)))
    os.truncate(reader.folder / "rank-00000.safetensors", 90)
    with pytest.raises(Damage, match="do not have the hash"):
        reader.read("model/weight")


@pytest.mark.parametrize("step", [1, 2])
def test_a_rename_that_is_lost_prunes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Also where a checkpoint of the same step is replaced."""
    both(tmp_path, 1)
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda a, b: None if ".partial-" in a.name else rename(a, b))
    with pytest.raises(CheckpointError, match="IG945"):
        both(tmp_path, step)
    assert [(step, whole(place, step)) for step, place in folder.checkpoints(tmp_path)] == [(1, True)]


def test_a_file_that_another_machine_sees_shorter_is_found_by_rank_0(tmp_path: Path) -> None:
    def cut(phase: str) -> None:
        if phase == "gathered":
            file = next(tmp_path.glob(".step-*/rank-00001.safetensors"))
            os.truncate(file, file.stat().st_size - 8)

    with pytest.raises(CheckpointError, match=r"IG945(.|\n)*rank-00001.safetensors(.|\n)*\d+ bytes instead of"):
        both(tmp_path, 1, (cut, lambda _: None))
    assert not folder.checkpoints(tmp_path)


# -- the folder ------------------------------------------------------------------------------------------------------


def steps_in(home: Path) -> list[int]:
    return [step for step, _ in folder.checkpoints(home)]


def test_the_newest_and_every_nth_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        (tmp_path / folder.name_of(step)).mkdir()
    folder.prune(tmp_path, 2, 3)
    assert steps_in(tmp_path) == [3, 6, 7]
    folder.prune(tmp_path, 0, None)
    assert steps_in(tmp_path) == [7]


def test_a_smaller_step_sets_the_larger_ones_aside_and_an_equal_one_replaces(tmp_path: Path) -> None:
    both(tmp_path, 3)
    both(tmp_path, 4)
    both(tmp_path, 2)
    assert steps_in(tmp_path) == [2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["aside-step-00000003", "aside-step-00000004", "step-00000002"]
    assert whole(tmp_path / "aside-step-00000004", 4)
    both(tmp_path, 2)
    assert whole(tmp_path / "step-00000002", 2)


def test_a_replacement_that_was_interrupted_is_undone(tmp_path: Path) -> None:
    both(tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.replaced")
    folder.sweep(tmp_path)
    assert whole(tmp_path / "step-00000002", 2)
