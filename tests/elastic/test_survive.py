"""A rank dies, and the run's losses are those of the run in which nobody did."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from isograd.checkpoint.folder import checkpoints
from isograd.comm import raw, world
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.elastic import WorkerPool, worker_pool
from isograd.elastic.copies import Offer
from isograd.elastic.emergency_checkpoint import CompleteCopies, newest
from isograd.errors import LaunchError
from isograd.io import atomic
from isograd.train import journal
from isograd.train.language import LanguageTask
from isograd.train.loop import run
from isograd.train.run import signals
from isograd.train.run.survive import shrunk_layout, survive
from tests import faults
from tests.train.conftest import text  # noqa: F401  (a fixture)
from tests.train.test_loop import QUIET, close, losses


def test_the_newest_copies_are_those_of_which_every_ranks_rows_are_held() -> None:
    older, newer = (1, 2), (0, 1)
    offers = {
        0: [Offer("a", 3, 3, older), Offer("a", 4, 3, newer)],
        1: [Offer("a", 3, 3, (2, 0)), Offer("a", 4, 3, (1,))],
    }
    assert newest(offers) == CompleteCopies("a", 3, 3, {1: [0], 0: [1, 2]})  # rank 2's rows of step 4 died with it
    offers[1][1] = Offer("a", 4, 3, (1, 2))
    assert newest(offers) == CompleteCopies("a", 4, 3, {0: [0], 1: [1, 2]})
    assert newest({0: [Offer("a", 3, 3, (0, 1))], 1: [Offer("b", 3, 3, (2,))]}) is None  # of two worlds
    assert newest({}) is None


@pytest.mark.parametrize(
    ("layout", "ranks", "listed", "found"),
    [
        ("dp4 zero1", 3, [], "dp2 zero1"),  # a batch of 8 cannot be cut over dp3
        ("dp2 tp2 sp zero1", 3, [], "tp2 sp zero1"),
        ("pp2 dp2", 2, [], "pp2"),
        ("tp4", 3, [], "tp2"),
        ("dp4", 3, ["dp3", "dp1"], "dp3"),
        ("dp4", 2, ["dp3", "dp1"], "dp1"),
        ("dp4", 2, ["dp3"], None),
        ("dp4", 0, [], None),
    ],
)
def test_fewer_ranks_take_the_first_layout_of_the_list_or_the_nearest_that_divides(
    layout: str, ranks: int, listed: list[str], found: str | None
) -> None:
    fits = lambda each: 8 % each.dp == 0  # noqa: E731
    one = shrunk_layout(Layout.parse(layout), ranks, [Layout.parse(each) for each in listed], fits)
    assert one == (Layout.parse(found) if found else None)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"copies": "partner"}, "of no use when resilience.after_death is end"),
        ({"after_death": "replace", "layouts": ["dp2"]}, "are for resilience.after_death shrink"),
        ({"after_death": "shrink", "layouts": ["dp4 zero1"]}, "must have fewer than the 4"),
        ({"after_death": "shrink", "layouts": ["dp3"]}, "batch 8 cannot be cut over dp 3"),
        ({"after_death": "shrink", "layouts": ["up3"]}, "resilience.layouts: "),
    ],
)
def test_a_resilience_that_cannot_work_is_a_mistake_in_the_config(tmp_path: Path, after: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        faults.config(tmp_path, tmp_path, "dp4", resilience=after)


def row_of(case: faults.Case, folder: Path, text: Path) -> faults.Row:  # noqa: F811
    expected = faults.undisturbed(folder / "whole", text, case.layout)
    return faults.one(case, folder, text, expected)


@pytest.mark.medium
def test_a_rank_that_dies_costs_no_step_and_no_bit(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """After the vote, where the others are about to write; rank 0, which holds the journal and the folder's lock."""
    row = row_of(faults.killed("dp2 zero1", "after the vote", 0), tmp_path, text)
    assert (row.code, row.named, row.lost, row.equal) == (0, "rank 0", 0, "the same bits")
    assert row.seen_s is not None and row.seen_s < 2
    assert row.recovered_s is not None
    lines = list(journal.read(tmp_path / "run" / "metrics.jsonl"))
    said = [line["text"] for line in lines if line.get("event") == "death"]
    assert len(said) == 1
    assert said[0].startswith("rank 0 (dp0) was killed by signal 9 (SIGKILL); the others were in step 4, ")
    assert "the state after step 3 was held by those that are left; 1 new process started" in said[0]
    (recovered,) = [line for line in lines if line.get("event") == "recovered"]
    parts = "others left", "state written", "ranks joined", "model built", "state loaded", "step"
    assert tuple(recovered["parts"]) == parts
    assert all(0 <= seconds < row.recovered_s for seconds in recovered["parts"].values())
    assert recovered["text"].startswith("recovered in ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill in meeting again", "kill in saving: half written", "SIGSTOP, rank 1"])
def test_a_fault_of_the_table_costs_no_bit(name: str, text: Path, tmp_path: Path) -> None:  # noqa: F811
    case = next(case for case in faults.cases() if case.name.startswith(name))
    row = row_of(case, tmp_path, text)
    assert (row.code, row.equal) == (0, "the same bits")


@pytest.mark.medium
def test_a_survivor_that_stands_still_while_it_writes_copies_has_died(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """FAILURES E6: the launcher waited for ever. Rank 1's partner, 3, holds its copies; 2 holds those of 0."""
    layout, stops = "dp4 zero1", faults.Fault(faults.RESCUING, faults.AT, 0, "stop")
    kills = faults.Fault("forward", faults.AT, 1)
    case = faults.Case("", layout, (kills, stops), faults.settings(safety={"stall_s": 4.0}, batch=8))
    row = faults.one(case, tmp_path, text, faults.undisturbed(tmp_path / "whole", text, layout))
    assert (row.code, row.named, row.lost, row.equal) == (0, "rank 1", 0, "the same bits")
    (said,) = [
        line["text"] for line in journal.read(tmp_path / "run" / "metrics.jsonl") if line.get("event") == "death"
    ]
    still = "rank 0, killed by signal 9 (SIGKILL), as it stood still for 4 s"
    assert f"held by those that are left, of which more died while they wrote it: {still}; 2 new" in said


def stands_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.medium
def test_a_member_that_no_signal_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a file system that does not answer."""
    monkeypatch.setattr(worker_pool, "LEFT_S", 1.0)
    with WorkerPool(still_s=1.0) as pool:
        pool.fill(2)
        stopped = pool.workers[1].process
        pid, kill = stopped.pid, stopped.kill
        monkeypatch.setattr(stopped, "kill", lambda: None)
        values, died = pool.ask({0: (os.getpid, ()), 1: (stands_still, ())})
        assert values == {0: pool.workers[0].process.pid}
        assert died == {1: "a new process, killed by signal 9 (SIGKILL), as it stood still for 1 s"}
        pool.remove_dead()
        assert len(pool.workers) == 1 and stopped not in multiprocessing.active_children()
        assert Path(f"/proc/{pid}").exists()
        kill()


class Yesterday:
    """The clock of the run's folder goes back a day. Rank 1 stands still in the fourth step, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, step: int, task: LanguageTask) -> None:
        replace_text = atomic.replace_text

        def late(file: Path, words: str) -> None:
            replace_text(file, words)
            os.utime(file, (time.time() - 86400,) * 2)

        if step == faults.AT and not self.mark.exists():
            atomic.replace_text = late
            if task.mesh.rank == 1:
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.medium
def test_a_silent_rank_is_found_whatever_the_clock_says(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """FAILURES E10: the launcher took the reports for those of an earlier world, and the run ended with 7."""
    config = faults.config(tmp_path / "run", text, "dp2 zero1", **faults.settings(safety={"stall_s": 3.0}))
    with faults.Watched(config) as pool:
        outcome = survive(config, replace(QUIET, before_step=Yesterday(tmp_path / "stopped")), pool)
    assert (outcome.code, outcome.step) == (0, faults.STEPS)
    assert pool.attempts[0].silent == {1: ""}


@pytest.mark.slow
def test_fewer_ranks_continue_twice_and_the_samples_stay_the_same(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """Two deaths, four ranks, then two, of which one is a rank that was left over. Without copies, from step 2."""
    expected = faults.undisturbed(tmp_path / "whole", text, "dp2 tp2 zero1")
    config = faults.config(
        tmp_path / "run", text, "dp2 tp2 zero1", resilience={"after_death": "shrink"}, checkpoint={"every": 2}
    )
    deaths = (Death(3, 3, tmp_path / "first"), Death(4, 1, tmp_path / "second"))
    with WorkerPool() as pool:
        outcome = survive(config, replace(QUIET, before_step=partial(_each, deaths)), pool)
        assert len(pool.workers) == 2
    assert (outcome.code, outcome.step) == (0, faults.STEPS)
    assert close(losses(tmp_path / "run"), expected)
    said = [line["text"] for line in journal.read(tmp_path / "run" / "metrics.jsonl") if line.get("event") == "death"]
    assert "back to the checkpoint of step 2; going on with 2 ranks as 'tp2 zero1'" in said[0]
    assert said[1].startswith("rank 1 (tp1) was killed") and "a rank that was left over takes its place" in said[1]


@pytest.mark.slow
def test_ranks_come_back_at_the_border_of_a_step_unless_the_code_has_changed(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = faults.undisturbed(tmp_path / "whole", text, "dp2")
    first = signals.source_hashes()
    assert {"train/run/signals.py", "engine/engine.py", "comm/raw.py"} <= first.keys()  # all of isograd
    grown = "ranks have come back: going on as 'dp2'"
    refused = "no rank joins: isograd's files have changed since this run began: cli.py"
    for number, (now, last) in enumerate(((first, grown), ({**first, "cli.py": ""}, refused))):
        codes = iter([first, now])
        monkeypatch.setattr(signals, "source_hashes", lambda: next(codes))
        folder = tmp_path / str(number)
        config = faults.config(
            folder, text, "dp2", resilience={"after_death": "shrink", "copies": "partner"}, checkpoint={"every": 1}
        )
        plan = partial(_each, (Death(2, 1, tmp_path / f"death-{number}"), Grow(3, folder / signals.GROW)))
        with WorkerPool() as pool:
            outcome = survive(config, replace(QUIET, before_step=plan), pool)
        assert (outcome.code, outcome.step) == (0, faults.STEPS)
        assert close(losses(folder), expected) and not (folder / signals.GROW).exists()
        said = [line for line in journal.read(folder / "metrics.jsonl") if line.get("event") == signals.GROW_EVENT]
        assert [(line["step"], line["text"]) for line in said] == [(4, last)]


@pytest.mark.medium
def test_the_only_rank_may_die_as_often_as_it_makes_progress_and_what_is_told_of_it_is_true(
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Before any step, and twice at one place: one more would end the run. And a file GROW where no rank is missing."""
    expected = faults.undisturbed(tmp_path / "whole", text, "dp1")
    folder = tmp_path / "run"
    after = {"after_death": "replace", "tries": 2}
    config = faults.config(
        folder, text, "dp1", resilience=after, checkpoint={"every": 2}, evaluate={"every": 3, "first": False}
    )
    deaths = tuple(Death(step, 0, tmp_path / f"{step}-{again}") for step, again in ((0, 0), (3, 0), (3, 1)))
    plan = partial(_each, (*deaths, Grow(4, folder / signals.GROW)))
    with WorkerPool() as pool:
        outcome = survive(config, replace(QUIET, before_step=plan), pool)
    assert (outcome.code, outcome.step) == (0, faults.STEPS)
    lines = list(journal.read(folder / "metrics.jsonl"))
    assert losses(folder) == expected and not (folder / signals.GROW).exists()
    assert [line["step"] for line in lines if line.get("event") == "evaluation"] == [3, faults.STEPS]
    said = [line for line in lines if line.get("event") == "death"]
    assert [line["text"].split("; ")[1:3] for line in said] == [
        ["none was left", "no step was finished"],
        *[["none was left", "step 3 was the last that was finished"]] * 2,
    ]
    for line in said:  # of which step the newest checkpoint is depends on how far its writer had come
        back = f"the checkpoint of step {line['step']}" if line["step"] else "the first step"
        assert line["text"].split("; ")[3:] == [f"back to {back}", "1 new process started"]
    assert [(line["step"], line["text"]) for line in lines if line.get("event") == signals.GROW_EVENT] == [
        (5, signals.NO_RANK_MISSING)
    ]


SERVED = """
import os, signal, time
from isograd.launcher.launch import launch
from isograd.errors import LaunchError
from isograd.elastic import WorkerPool

def dies():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

if __name__ == "__main__":
    try:
        launch(dies, 1)
    except LaunchError as error:
        print(error)
    with WorkerPool() as pool:
        pool.fill(2)
        pids = [worker.process.pid for worker in pool.workers]
        attempt = pool.attempt(1, dies)
        print(attempt.server is not None, pool.workers, [os.path.exists(f"/proc/{pid}/maps") and
              bool(open(f"/proc/{pid}/maps").read()) for pid in pids])
        pool.fill(1)
        print(pool.attempt(1, os.getpid).values == [pool.workers[0].process.pid])
"""


@pytest.mark.medium
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs os.waitid")
def test_the_death_of_the_server_that_starts_ranks_is_named_and_its_ranks_end(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    words = subprocess.run([sys.executable, "served.py"], cwd=tmp_path, check=True, text=True, capture_output=True)
    assert "IG252: the server that starts ranks has died: its process " in words.stdout
    assert words.stdout.splitlines()[-2:] == ["True [] [False, False]", "True"]


class Grow:
    """Asks for the ranks to come back, once the run has become smaller."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def __call__(self, step: int, task: LanguageTask) -> None:
        if step == self.step and task.mesh.layout.world_size == 1:
            self.file.touch()


def dies() -> None:
    """Rank 1."""
    if world.world()[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raw.all_max(torch.ones(1), Mesh("dp2").group("world"))


def dies_unnoticed() -> None:
    """Rank 1, and the process that tells the launcher of it gets no turn for four seconds."""
    if world.world()[0] == 1:
        server = os.getppid()
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {server}"])
        os.kill(server, signal.SIGSTOP)
    dies()


@pytest.mark.medium
def test_a_death_is_a_death_when_the_others_feel_it_before_the_launcher_is_told() -> None:
    """The run ended with the error of a rank whose connection had closed."""
    with WorkerPool() as pool:
        pool.fill(2)
        attempt = pool.attempt(2, dies_unnoticed)
        assert attempt.values is None and attempt.dead == {1: -signal.SIGKILL}
        assert len(pool.workers) == 1


@pytest.mark.medium
def test_who_is_left_is_a_world_of_one_and_of_two_with_a_new_rank() -> None:
    """It waited for the rank that had died."""
    with WorkerPool() as pool:
        pool.fill(2)
        assert pool.attempt(2, dies).dead == {1: -signal.SIGKILL}
        assert pool.attempt(1, world.world).values == [(0, 1)]
        assert pool.fill(2) == 1 and pool.attempt(2, world.world).values == [(0, 2), (1, 2)]


def raises_and_is_slow_to_answer() -> None:
    """Rank 0, after its connections have closed."""
    leave = world.leave

    def slow() -> None:
        world.leave = leave
        leave()
        gc.collect()
        time.sleep(1)

    if world.world()[0] == 0:
        world.leave = slow  # type: ignore[assignment]
        raise ValueError("the cause")
    raw.all_max(torch.ones(1), Mesh("dp2").group("world"))


@pytest.mark.medium
def test_the_cause_of_the_end_is_named_and_not_the_connection_that_closed_after_it() -> None:
    with WorkerPool() as pool, pytest.raises(LaunchError, match="rank 0 of 2 raised the above first") as caught:
        pool.fill(2)
        pool.attempt(2, raises_and_is_slow_to_answer)
    assert "ValueError: the cause" in str(caught.value)


@pytest.mark.medium
def test_what_always_dies_and_what_raises_ends_the_run(text: Path, tmp_path: Path) -> None:  # noqa: F811
    config = faults.config(tmp_path / "run", text, "dp2", resilience={"after_death": "replace", "tries": 1})
    with (
        WorkerPool() as pool,
        pytest.raises(LaunchError, match="IG255: ranks died 2 times without a new step in between"),
    ):
        survive(config, replace(QUIET, before_step=_always), pool)
    # The rank that was left held all of step 1 (ZeRO 0), from which the same command resumes.
    assert [step for step, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [1]
    with WorkerPool() as pool:
        pool.fill(2)
        with pytest.raises(LaunchError, match="ValueError: no accident"):
            pool.attempt(2, run, config, replace(QUIET, before_step=_raises))


class Death:
    """Ends a rank before a step, once."""

    def __init__(self, step: int, rank: int, mark: Path) -> None:
        self.step, self.rank, self.mark = step, rank, mark

    def __call__(self, step: int, task: LanguageTask) -> None:
        if (step, task.mesh.rank) == (self.step, self.rank) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _each(deaths: tuple[Death | Grow, ...], step: int, task: LanguageTask) -> None:
    for death in deaths:
        death(step, task)


def _always(step: int, task: LanguageTask) -> None:
    if step == 1 and task.mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _raises(step: int, task: LanguageTask) -> None:
    if step == 1 and task.mesh.rank == 1:
        raise ValueError("no accident")
