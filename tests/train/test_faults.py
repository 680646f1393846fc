"""Faults of a machine: flipped bits, NaN in the optimizer's state, a slow disk, a rank that never comes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest.mock import patch

import psutil
import pytest
import torch
import yaml

from isograd.checkpoint import CheckpointManager, files, folder, write
from isograd.checkpoint.compare import damages
from isograd.checkpoint.read import Reader
from isograd.engine.plan import Slot
from isograd.errors import CheckpointError, LaunchError, TrainError
from isograd.launcher.launch import World
from isograd.train import journal, loop
from isograd.train.language import LanguageTask
from isograd.train.run import peers
from isograd.train.run.watchdog import STALLED
from tests.checkpoint import toys
from tests.sizes import few
from tests.train.test_loop import QUIET, config_of, losses

# -- a flipped bit ---------------------------------------------------------------------------------------------------


SLOW_STEPS = """
import sys
from dataclasses import replace
from isograd.cli.main import main
from isograd.train.run import start
from tests.train.test_faults import slow_steps
real = start._done_here
start._done_here = lambda config, ranks, orders: real(config, ranks, replace(orders, before_step=slow_steps))
if __name__ == "__main__":
    sys.exit(main())
"""


def flip_a_bit(tensor: torch.Tensor, row: int, bit: int) -> None:
    whole = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    tensor.view(whole)[row].flatten()[3:4].bitwise_xor_(1 << bit)  # of the mantissa; 0 is the lowest


def flips(late: bool) -> list[tuple[str, str]]:
    """(what was flipped, what was said) for each stage and dtype, in rows that the rank owns and in others.

    `late`: copies are not compared in the step before which the bit flips, but in the next one.
    """
    found = []
    for zero in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            for owned in (True, False):
                engine = toys.engine_of(f"dp2 zero{zero}", dtype=dtype)
                toys.train(engine, 0, 1, gradients=False)
                peers.equal_copies(engine, 1)
                if engine.mesh.rank == 1:
                    slot = next(slot for slot in engine.plan.slots if slot.name == "blocks.1.mlp.up.weight")
                    # An optimizer's step may round a difference in the lowest bit away.
                    flip_a_bit(engine.local_shard(slot.name), row_of(slot, owned), bit=5 if late else 0)
                engine.accumulate(toys.batch(1, engine.mesh), 2)
                if late:
                    engine.step()
                    engine.accumulate(toys.batch(2, engine.mesh), 2)
                try:
                    peers.equal_copies(engine, 2 + late)
                    said = "nothing"
                except TrainError as error:
                    said = str(error)
                found.append((f"zero{zero} {dtype} {owned}", said))
    return found


def row_of(slot: Slot, owned: bool) -> int:
    mine = range(slot.cuts[slot.owner], slot.cuts[slot.owner + 1])
    return next(row for row in range(len(slot.parameter)) if (row in mine) == owned)


def test_one_flipped_bit_is_found_at_every_stage_before_the_step_overwrites_it(worlds) -> None:
    """FAILURES B2: at ZeRO 1 and 2 copies were compared after the owners' rows had replaced them."""
    ours, theirs = worlds(2).run(flips, False)
    assert ours == theirs
    assert len(ours) == 12
    for what, said in ours:
        assert "IG984" in said and "rank 0 and rank 1 differ in blocks.1.mlp.up.weight" in said, what


def test_a_flip_in_a_step_that_is_not_compared_is_found_later_only_at_zero_0(worlds) -> None:
    """docs/corruption.md: at ZeRO 1 and 2 the step writes the owner's rows into all copies."""
    ours, theirs = worlds(2).run(flips, True)
    assert ours == theirs
    assert len(ours) == 12
    for what, said in ours:
        assert ("IG984" in said) == what.startswith("zero0"), what
        assert "IG984" in said or said == "nothing", what


# -- NaN -------------------------------------------------------------------------------------------------------------


def spoil(step: int, task: LanguageTask, *, at: int) -> None:
    """What a flipped exponent bit does: NaN in Adam's state on one rank. The gradients stay finite."""
    if step == at and task.mesh.rank == 1:
        next(kept for kept in task.engine.optimizer.state.values() if kept)["exp_avg"].view(-1)[0] = torch.nan


def test_a_state_with_nan_is_not_saved_and_the_run_resumes_before_it(worlds, text: Path, tmp_path: Path) -> None:
    """FAILURES B3: the checkpoint at exit code 6 held the NaN, and --resume auto took it for ever."""
    config = config_of(tmp_path / "run", text, layout="dp2 zero1", checkpoint={"every": 1})
    outcome = worlds(2).run(loop.run, config, replace(QUIET, before_step=partial(spoil, at=3)))[0]
    assert (outcome.code, outcome.step) == (loop.NOT_FINITE, 3)
    assert "after step 4 is not finite, and was not saved: rank 1: " in outcome.why
    assert "optimizer/exp_avg/" in outcome.why and "model/" in outcome.why
    assert folder.checkpoints(tmp_path / "run" / "checkpoints")[-1][0] == 3
    assert [line["event"] for line in journal.read(tmp_path / "run" / "metrics.jsonl") if "event" in line][-1] == (
        "not saved"
    )
    assert worlds(2).run(loop.run, config, QUIET)[0].code == 0
    whole = config_of(tmp_path / "whole", text, layout="dp2 zero1")
    worlds(2).run(loop.run, whole, QUIET)
    assert losses(tmp_path / "run")[-3:] == losses(tmp_path / "whole")[-3:]


def wrong_once(step: int, task: LanguageTask) -> None:
    """In step 2 rank 1 makes one wrong gradient; before step 4 the lowest bit of one of its numbers flips in memory."""
    if step == 3 and task.mesh.rank == 1 and not hasattr(task, "has_flipped"):
        task.has_flipped = True  # type: ignore[attr-defined]
        kept = next(kept for kept in task.engine.optimizer.state.values() if kept["exp_avg"].numel() > 8)
        kept["exp_avg"].view(torch.int32).view(-1)[5] ^= 1
    if step != 1 or task.mesh.rank != 1 or hasattr(task, "was_wrong"):
        return
    task.was_wrong = True  # type: ignore[attr-defined]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient * (1 + 2**-20)

    handle = task.engine.plan.slots[0].parameter.register_hook(hook)


@pytest.mark.medium
def test_a_step_with_a_wrong_gradient_or_a_changed_state_is_done_again_and_the_run_is_as_if_nothing_had_happened(
    worlds, text: Path, tmp_path: Path
) -> None:
    safety = {"sums_every": 2, "replay_every": 2, "state_every": 1, "state": "all"}
    copies = {"after_death": "replace", "copies": "partner"}
    config = config_of(tmp_path / "run", text, layout="dp2 zero1", steps=4, safety=safety, resilience=copies)
    assert worlds(2).run(loop.run, config, replace(QUIET, before_step=wrong_once))[0].code == 0
    said = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if "corrupted" in line]
    assert len(said) == 2
    assert "rank 1 computed wrongly" in said[0]
    assert "what a rank keeps has changed between two steps (optimizer/exp_avg/" in said[1]
    assert "on rank 1); the step is done again" in said[1]
    whole = config_of(tmp_path / "whole", text, layout="dp2 zero1", steps=4)
    worlds(2).run(loop.run, whole, QUIET)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def flip_once(step: int, task: LanguageTask) -> None:
    """Before step 2 the lowest bit of one weight flips on the last rank."""
    if step == 1 and task.mesh.rank == task.mesh.size("world") - 1 and not hasattr(task, "has_flipped"):
        task.has_flipped = True  # type: ignore[attr-defined]
        name = next(r.name for r in task.engine.table if task.engine.local_shard(r.name).numel() > 8)
        task.engine.local_shard(name).view(torch.int32).view(-1)[5] ^= 1


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero3", "tp2", "cp2", "pp2"])
def test_by_default_a_flipped_weight_is_found_in_its_step(worlds, text: Path, tmp_path: Path, layout: str) -> None:
    """FAILURES E11: silent at ZeRO 1 to 3, tp and pp. Other ranks give it back where they have it."""
    config = config_of(tmp_path / "run", text, layout=layout, steps=3)
    again = layout in ("dp2", "dp2 zero1", "cp2")
    orders = replace(QUIET, before_step=flip_once)
    if again:
        assert worlds(2).run(loop.run, config, orders)[0].code == 0
        said = (tmp_path / "run" / "metrics.jsonl").read_text()
        assert "on rank 1); the step is done again" in said
        whole = config_of(tmp_path / "whole", text, layout=layout, steps=3)
        worlds(2).run(loop.run, whole, QUIET)
        assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    else:
        with pytest.raises(LaunchError, match="IG583") as error:
            worlds(2).run(loop.run, config, orders)
        assert "on rank 1" in str(error.value)


# -- a slow disk -----------------------------------------------------------------------------------------------------


@contextmanager
def slow_writer(seconds: float) -> Iterator[None]:
    """Each tensor takes this long."""
    original = write.write_tensors

    def slow(path: Path, entries, tensors, *rest) -> int:
        def each() -> Iterator[torch.Tensor]:
            for tensor in tensors:
                time.sleep(seconds)
                yield tensor

        return original(path, entries, each(), *rest)

    write.write_tensors = slow  # type: ignore[assignment]
    try:
        yield
    finally:
        write.write_tensors = original


def slow_run(home: Path, text: Path, limit: float) -> tuple[int, float]:
    """Rank 1 takes three times the limit to write a checkpoint; rank 0 waits for it."""
    config = config_of(home, text, layout="dp2", steps=2, safety={"stall_s": limit}, evaluate={"batches": 1})

    began = time.monotonic()
    with ExitStack() as stack:

        def slow(step: int, task: LanguageTask) -> None:
            tensors = sum(len(kept) for kept in task.engine.optimizer.state.values())
            if step == 1 and task.mesh.rank == 1:
                stack.enter_context(slow_writer(3 * limit / tensors))

        return loop.run(config, replace(QUIET, before_step=slow)).code, time.monotonic() - began


@pytest.mark.medium
def test_a_save_may_take_longer_than_the_watchdogs_limit(worlds, text: Path, tmp_path: Path) -> None:
    """FAILURES B8: the run was ended, the partial folder swept, and the next run ended the same way."""
    limit = 4.0
    for code, seconds in worlds(2).run(slow_run, tmp_path, text, limit):
        assert code == 0
        assert seconds > 1.5 * limit


def error_during_a_save(home: Path) -> list[int]:
    engine = toys.engine_of("dp2 zero1")
    toys.train(engine, 0, 1, gradients=False)
    slow = slow_writer(0.03) if engine.mesh.rank == 1 else nullcontext()
    with slow, pytest.raises(ValueError, match="elsewhere"), CheckpointManager(home, engine) as keeper:
        keeper.save(1)
        raise ValueError("elsewhere")
    return [step for step, _ in folder.checkpoints(home)]


def test_an_error_elsewhere_lets_a_save_under_way_finish(worlds, tmp_path: Path) -> None:
    """FAILURES B8."""
    assert worlds(2).run(error_during_a_save, tmp_path) == [[1], [1]]


def killed_while_the_other_rank_writes(home: Path) -> None:
    """Rank 1 has written its part, and is killed; rank 0, in `wait`, writes for ten seconds more."""
    engine = toys.engine_of("dp2 zero1")
    toys.train(engine, 0, 1, gradients=False)
    with slow_writer(0.1 if engine.mesh.rank == 0 else 0.0), CheckpointManager(home, engine) as keeper:
        keeper.save(1)
        if engine.mesh.rank == 1:
            assert keeper._writing is not None
            keeper._writing.join()
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
        keeper.wait()


@pytest.mark.medium
def test_a_rank_that_is_killed_after_its_part_does_not_end_the_other_ranks_part(tmp_path: Path) -> None:
    """`wait` had forgotten the save that it waited for, and the launcher killed the writer after three seconds."""
    began = time.monotonic()
    with World(2, busy=folder.Growing(tmp_path)) as world, pytest.raises(LaunchError, match="rank 1 ended: killed"):
        world.run(killed_while_the_other_rank_writes, tmp_path)
    assert [step for step, _ in folder.checkpoints(tmp_path)] == [1]
    assert time.monotonic() - began > 4.0


def test_a_writer_gives_a_sign_of_life_every_few_seconds_on_a_disk_of_any_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written goes to the disk at a flush, which takes as long as all of it needs. The clock is made up."""
    for rate in (0.5e6, 3e6, 30e6, 3e9):  # bytes a second
        clock, flushed, signs = [0.0], [0], [0.0]

        def flush(file: IO[bytes], rate: float = rate, clock=clock, flushed=flushed) -> None:
            there = file.tell()  # once: the writer goes on meanwhile
            clock[0] += (there - flushed[0]) / rate
            flushed[0] = there

        monkeypatch.setattr(files, "flush", flush)
        monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda clock=clock: clock[0]))
        tensor = torch.zeros(20_000_000, dtype=torch.uint8)
        files.write_tensors(
            tmp_path / "t", [files.entry("t", tensor)], [tensor], {},
            lambda clock=clock, signs=signs: signs.append(clock[0]),
        )  # fmt: skip
        signs.append(clock[0])
        assert clock[0] >= 20e6 / rate
        assert max(b - a for a, b in pairwise(signs)) < 2.5


# -- a save that fails: FAILURES E8 ----------------------------------------------------------------------------------


class Disk:
    """Fails `times` times, from the save of `step` on, on one rank; the run's writer of a step before is awaited."""

    def __init__(self, how: str, step: int, times: int) -> None:
        self.how, self.step, self.left = how, step, times
        self.whole = files.flush, Path.rename

    def __call__(self, step: int, task: LanguageTask) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("isograd checkpoint"):
                thread.join(0.2)  # a writer fails within the step after the save; one that pauses is not awaited
        if step == self.step - 1 and task.mesh.rank == (0 if self.how == "rename" else 1):
            files.flush = self.flush
            Path.rename = lambda a, b: self.rename(a, b)  # type: ignore[method-assign] # noqa: PLW0108

    def fails(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def flush(self, file: IO[bytes]) -> None:
        if self.how != "rename" and "safetensors" in file.name and self.fails():
            raise OSError(getattr(errno, self.how), os.strerror(getattr(errno, self.how)))
        self.whole[0](file)

    def rename(self, source: Path, target: Path) -> Path:
        lost = self.how == "rename" and ".partial-" in source.name and self.fails()
        return target if lost else self.whole[1](source, target)

    def mend(self) -> None:
        files.flush, Path.rename = self.whole  # type: ignore[method-assign]


def failing_saves(home: Path, text: Path, on_error: str, disk: tuple[str, int, int]) -> str:
    """Six steps, saved every two; how the run ended."""
    saving = {"every": 2, "keep_last": 9, "on_error": on_error}
    config = config_of(home, text, layout="dp2 zero1", steps=6, evaluate={"batches": 1}, checkpoint=saving)
    broken = Disk(*disk)
    with patch("isograd.checkpoint.manager.PAUSE_S", 0.01):
        try:
            return str(loop.run(config, replace(QUIET, before_step=broken)).code)
        except CheckpointError as error:
            return str(error)
        finally:
            broken.mend()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("on_error", "disk", "code", "saved", "steps"),
    [
        ("retry", ("EIO", 2, 2), "0", [2, 4, 6], 6),
        ("retry", ("rename", 4, 1), "0", [2, 4, 6], 6),
        ("retry", ("ENOSPC", 4, 99), "IG930", [2], 6),
        ("go_on", ("EIO", 2, 1), "0", [4, 6], 6),
        ("go_on", ("ENOSPC", 4, 99), "IG930", [2], 6),
        ("stop", ("EIO", 2, 1), "IG930", [], 3),
        ("stop", ("rename", 2, 1), "IG945", [], 3),
    ],
)
def test_a_save_that_fails_is_told_at_the_next_step_and_done_again_or_left_out(
    worlds, text: Path, tmp_path: Path, on_error: str, disk: tuple[str, int, int], code: str, saved: list[int],
    steps: int,
) -> None:  # fmt: skip
    ended = worlds(2).run(failing_saves, tmp_path / "run", text, on_error, disk)
    assert ended[0].splitlines()[0] == ended[1].splitlines()[0]
    assert ended[0].startswith(code), ended[0]
    places = folder.checkpoints(tmp_path / "run" / "checkpoints")
    assert [step for step, _ in places] == saved
    assert not any(damage for _, place in places for _, damage in damages(Reader(place)))
    lines = list(journal.read(tmp_path / "run" / "metrics.jsonl"))
    done = [line["step"] for line in lines if "event" not in line]
    assert done[-1] <= steps
    told = [number for number, line in enumerate(lines) if line.get("event") == "not saved"]
    assert bool(told) == (on_error != "stop")
    if told:
        step = disk[1]
        before = [line["step"] for line in lines[: told[0]] if "event" not in line]
        # The writer is looked at after each step: it may fail at once, or, slowly, just before the next save.
        assert before[-1] in (step, step + 1, step + 2)
        assert f"the checkpoint of step {step}: " in lines[told[0]]["text"]
        assert ("try 2 of 3" in lines[told[0]]["text"]) == (on_error == "retry")


# -- a task that is suspended -----------------------------------------------------------------------------------------


def slow_steps(step: int, task: LanguageTask) -> None:
    for _ in range(10):  # one sleep would be over when the process wakes up
        time.sleep(0.1)


def everyone(pid: int) -> list[int]:
    """A process and all below it, those first that others wait for."""
    return [pid, *(below.pid for below in psutil.Process(pid).children(recursive=True))]


@pytest.mark.medium
@pytest.mark.parametrize("stays", few([False, True], slow=[False]))
def test_a_job_that_is_suspended_goes_on_and_a_rank_that_stays_behind_is_found(
    text: Path, tmp_path: Path, stays: bool
) -> None:
    """FAILURES E10: exit code 7. `stays`: rank 1 is not woken up, and is the one that is named."""
    survives = {"resilience": {"after_death": "replace", "copies": "partner"}} if stays else {}
    config = config_of(tmp_path / "run", text, layout="dp2", safety={"stall_s": 3.0}, steps=8, **survives)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-c", SLOW_STEPS, "train", str(tmp_path / "config.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while len(losses(tmp_path / "run")) < 3:
            time.sleep(0.05)
        pids = everyone(process.pid)
        silent = [pid for pid in pids if psutil.Process(pid).name() == "isograd r1"]
        assert len(silent) == 1
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8)
        for pid in pids:
            if not stays or pid not in silent:
                os.kill(pid, signal.SIGCONT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    deaths = [line for line in journal.read(tmp_path / "run" / "metrics.jsonl") if line.get("event") == "death"]
    assert len(deaths) == stays
    assert not stays or "as it gave no sign of life" in deaths[0]["text"]
    assert len(losses(tmp_path / "run")) == 8


# -- a rank that never comes -----------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_rank_that_never_joins_is_named_within_the_limit(text: Path, tmp_path: Path) -> None:
    """FAILURES B9: 75 s of silence, whatever safety.stall_s said."""
    config = config_of(tmp_path / "run", text, layout="dp2", safety={"stall_s": 3.0})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    stale = tmp_path / "run" / "stalled" / "rank-00001.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an earlier run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ended = subprocess.run(
        [sys.executable, "-m", "isograd", "train", str(tmp_path / "config.yaml")],
        env={**os.environ, **place, "MASTER_PORT": str(port)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == STALLED
    assert "IG980: no progress for 3 s while joining the other ranks\n" in ended.stderr
    assert f"rank 1 of 2 did not join rank 0 on {socket.gethostname()} at 127.0.0.1:{port}\n" in ended.stderr
    assert "start the missing ranks; if they run, their machines do not reach" in ended.stderr
    assert "rank 1 was never seen" in ended.stderr
