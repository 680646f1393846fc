"""Local ranks: values in order, the first failing rank first, hangs shown with stacks, nothing left behind."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.comm import raw
from isograd.comm import world as comm_world
from isograd.core.mesh import Mesh
from isograd.errors import CommError, ConfigError, LaunchError, TrainError
from isograd.launcher.launch import World, launch


def who(offset: int) -> tuple[int, str, int]:
    return comm_world.world()[0] + offset, os.environ["WORLD_SIZE"], torch.get_num_threads()


def name() -> str:
    return Path("/proc/self/comm").read_text()


def pid() -> int:
    return os.getpid()


def one_raises() -> None:
    mesh = Mesh("dp3")
    if mesh.rank == 1:
        raise ValueError("the batch is empty")
    raw.all_reduce(torch.zeros(1), mesh.group("world"))  # the others wait for a rank that never comes


def one_is_killed() -> None:
    mesh = Mesh("dp2")
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raw.all_reduce(torch.zeros(1), mesh.group("world"))


def one_leaves() -> None:
    if comm_world.world()[0] == 0:
        os._exit(3)


def only_one_reaches_the_collective() -> None:
    mesh = Mesh("dp2")
    if mesh.rank == 0:
        raw.all_reduce(torch.ones(3), mesh.group("world"))
    else:
        sleeping_in_the_data_loader()


def sleeping_in_the_data_loader() -> None:
    time.sleep(60)


def unsendable() -> object:
    return lambda: 0


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"


def test_launch_returns_each_ranks_value_in_rank_order() -> None:
    assert launch(who, 3, 10) == [(10, "3", 1), (11, "3", 1), (12, "3", 1)]


def test_a_world_is_reused_and_leaves_no_process_and_no_directory() -> None:
    with World(2) as world:
        first = world.run(pid)
        assert world.run(pid) == first == world.pids
        if sys.platform == "linux":
            assert world.run(name) == ["isograd r0\n", "isograd r1\n"]
        directory = Path(world._ranks.directory)
        assert directory.exists()
    assert all(gone(process) for process in first)
    assert not directory.exists()


def test_the_first_failing_ranks_traceback_comes_first_and_the_others_are_stopped() -> None:
    began = time.monotonic()
    with World(3) as world:
        with pytest.raises(LaunchError) as error:
            world.run(one_raises)
        assert time.monotonic() - began < 15
        text = str(error.value)
        assert text.lstrip().startswith("Traceback")
        assert text.index("the batch is empty") < text.index("IG253: rank 1 of 3 raised the above first")
        assert "[0, 2] waited for it" in text
        assert len(world.run(pid)) == 3  # started anew


def one_aborts() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGABRT)


def test_an_aborted_rank_points_at_the_others() -> None:
    with pytest.raises(LaunchError, match="see what the others raised"):
        launch(one_aborts, 2)


def test_a_killed_rank_is_named_with_its_signal_and_likely_cause() -> None:
    with pytest.raises(LaunchError) as error:
        launch(one_is_killed, 2)
    assert error.value.code == "IG252"
    assert "rank 1 ended: killed by signal 9 (SIGKILL)" in str(error.value)
    assert "out of memory is likely" in str(error.value)


def test_a_rank_that_dies_between_two_runs_is_named_and_the_next_run_has_new_ranks() -> None:
    """FAILURES B18: BrokenPipeError from `send`, nobody named."""
    with World(2) as world:
        first = world.run(pid)
        os.kill(first[1], signal.SIGKILL)
        while not gone(first[1]):
            time.sleep(0.01)
        with pytest.raises(LaunchError, match=r"rank 1 ended( between two runs)?: killed by signal 9") as caught:
            world.run(pid)
        assert "out of memory" in str(caught.value)
        assert set(world.run(pid)).isdisjoint(first)


def one_refuses() -> None:
    if Mesh("dp2").rank == 1:
        raise ConfigError("IG635", "ids", seen=5, expected=4, fix="less", where="rank 1")
    raw.all_reduce(torch.zeros(1), Mesh("dp2").group("world"))


def closes_its_connections() -> int:
    mesh = Mesh("dp2")
    comm_world.leave("an interrupt")
    return mesh.rank


def test_a_world_whose_ranks_closed_their_connections_has_new_ones_in_the_next_run() -> None:
    with World(2) as world:
        assert world.run(closes_its_connections) == [0, 1]
        assert [rank for rank, *_ in world.run(who, 0)] == [0, 1]  # torch's traceback, of a place to meet


def meets_anew() -> list[Any]:
    """Each rank in turn closes its connections, while the other one waits for it."""
    said: list[Any] = []
    for failing in (1, 0, 1):
        group, x = Mesh("dp2").group("world"), torch.ones(1)
        try:
            if group.index == failing:
                comm_world.leave("a bad row")
            raw.all_reduce(x, group)
        except CommError as error:
            said.append(f"{error.code} {error.seen or error.what}")
        said.append(float(raw.all_reduce(x, Mesh("dp2").group("world"))))
    return said


def test_ranks_that_a_failure_has_parted_meet_in_a_new_world_as_often_as_it_comes() -> None:
    with World(2) as world:
        for rank, said in enumerate(world.run(meets_anew)):
            for failing, error, total in zip((1, 0, 1), said[::2], said[1::2], strict=True):
                assert total == 2 and "a bad row" in error, said
                assert error.startswith("IG207" if rank == failing else f"IG213 rank {failing}: "), said


def test_an_error_of_isograd_on_a_rank_comes_back_as_itself_with_its_exit_code() -> None:
    """FAILURES B12: exit 1 behind worker frames. The command line prints the cause alone."""
    with pytest.raises(LaunchError) as caught:
        launch(one_refuses, 2)
    assert str(caught.value.cause) == str(ConfigError("IG635", "ids", seen=5, expected=4, fix="less", where="rank 1"))
    assert (caught.value.exit_code, LaunchError("IG252", "killed").exit_code) == (2, 1)
    assert TrainError("IG981", "full").exit_code == 1


KILLED = """
import os, signal, sys
from isograd.launcher import worker
from isograd.launcher.launch import World
def words():
    worker.when_orphaned(lambda: "its last words")
if __name__ == "__main__":
    world = World(1)
    world.run(words)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folders_of_a_killed_launcher_are_removed_by_the_next_one(tmp_path: Path) -> None:
    """FAILURES B11: folders isograd-* and multiprocessing's stayed for ever."""
    script = tmp_path / "launcher.py"
    script.write_text(KILLED)
    temporary = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets lie in it
    (temporary / "isograd-somebody").mkdir()  # has no lock: not known to be anyone's, and left alone
    lived = subprocess.Popen([sys.executable, "-c", LIVES], env={**os.environ, "TMPDIR": str(temporary)},
                             stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)  # fmt: skip
    assert lived.stdout is not None
    kept = Path(lived.stdout.readline().strip())
    seen = list[list[str]]()
    for how in ("killed", "ended"):
        command = [sys.executable, str(script), how]
        ended = subprocess.run(command, env={**os.environ, "TMPDIR": str(temporary)}, check=how == "ended", timeout=60,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert ended.stderr == ("its last words\n" if how == "killed" else "")
        seen.append(sorted(p.name for p in temporary.iterdir()))
    assert len(seen[0]) == 3
    assert seen[1] == sorted(["isograd-somebody", kept.name])  # a process that lives keeps its folder
    lived.communicate("\n")
    assert not kept.exists()
    shutil.rmtree(temporary)


LIVES = "from isograd.io import tempdir; print(tempdir.home(), flush=True); input()"


def test_a_rank_that_exits_without_an_answer_is_named() -> None:
    with pytest.raises(LaunchError, match="rank 0 ended: exit code 3"):
        launch(one_leaves, 2)


def test_a_hang_ends_with_the_place_where_each_rank_waits() -> None:
    with pytest.raises(LaunchError) as error:
        launch(only_one_reaches_the_collective, 2, timeout=6)
    text = str(error.value)
    assert error.value.code == "IG254"
    first, second = text.split("rank 1:")
    assert "in all_reduce" in first
    assert "in sleeping_in_the_data_loader" in second


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(LaunchError, match="IG251"):
        launch(lambda: 0, 1)
    with pytest.raises(LaunchError, match="cannot be sent to the parent"):
        launch(unsendable, 1)
    with pytest.raises(LaunchError, match="IG250"):
        launch(pid, 0)


NOTEBOOK = """
    import isograd
    def square(mesh_layout):
        return isograd.Mesh(mesh_layout).rank ** 2
    print(isograd.launch(square, 3, "dp3"))
"""


def test_functions_of_a_notebook_which_no_file_holds_can_be_launched() -> None:
    done = subprocess.run(
        [sys.executable, "-"], check=False, input=textwrap.dedent(NOTEBOOK), text=True, capture_output=True, timeout=60
    )
    assert done.stdout.strip() == "[0, 1, 4]", done.stderr


CONNECTED = """
    import isograd, psutil, torch
    def step():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        engine = isograd.Engine(model, isograd.Mesh("dp10"), lambda ps: torch.optim.SGD(ps, lr=0.1))
        engine.backward(model(torch.ones(2, 4)).square().mean(), weight=2)
        connections = psutil.Process().net_connections()
        return engine.step().loss, sum(each.status == "ESTABLISHED" for each in connections)
    print(isograd.launch(step, 10))
"""


@pytest.mark.slow
def test_ranks_that_are_connected_at_their_first_message_have_fewer_connections() -> None:
    steps = []
    for lazy in ("0", "1"):
        program, environment = textwrap.dedent(CONNECTED), os.environ | {"TORCH_GLOO_LAZY_INIT": lazy}
        done = subprocess.run(
            [sys.executable, "-"], check=False, input=program, text=True, capture_output=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        steps.append(ast.literal_eval(done.stdout))
    for (loss, connections), (lazily, fewer) in zip(*steps, strict=True):
        assert loss == lazily and fewer < connections


def begins_anew_alone(folder: str, first: int) -> str:
    """Each rank while the other one is elsewhere: `first`, then the other."""
    comm_world.AGAIN_S, (rank, _) = 1.0, comm_world.world()
    done = [Path(folder) / f"{number}" for number in (0, 1)]
    while rank != first and not done[first].exists():
        time.sleep(0.05)
    comm_world.leave("a loop failed")
    try:
        comm_world.world()
    except CommError as error:
        found = str(error)
    else:
        found = "it has begun anew"
    done[rank].touch()
    while not done[1 - rank].exists():
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_whose_others_do_not_begin_anew_is_refused(tmp_path, first: int) -> None:
    for said in launch(begins_anew_alone, 2, str(tmp_path), first, timeout=40):
        assert "IG213" in said and "not begun anew within 1 s" in said


ORPHANS = """
    import os, sys, time
    from isograd.launcher.launch import World
    from tests.launcher.test_launch import pid
    if __name__ == "__main__":
        world = World(2)
        print(*world.run(pid), flush=True)
        os.kill(os.getpid(), 9)
"""


def test_ranks_die_with_their_parent(tmp_path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(textwrap.dedent(ORPHANS))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        text=True,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    ranks = [int(word) for word in done.stdout.split()]
    assert len(ranks) == 2, done.stderr
    end = time.monotonic() + 10
    while not all(gone(process) for process in ranks) and time.monotonic() < end:
        time.sleep(0.1)
    assert all(gone(process) for process in ranks)


def listening_addresses() -> list[str]:
    """Local addresses on which this rank listens, from the kernel's own table."""
    inodes = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return found


def test_ranks_listen_on_the_loopback_interface_only() -> None:
    loopback = {"0100007F", "00000000000000000000000001000000"}
    for addresses in launch(listening_addresses, 2):
        assert set(addresses) <= loopback
