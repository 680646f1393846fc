"""Checkpoints in object stores: as on a disk, whole or not at all. A real S3 server (moto's) where it and s3fs are
installed; fsspec's own file systems always."""

from __future__ import annotations

import gc
import http.client
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.checkpoint import CheckpointManager, folder, write
from isograd.checkpoint.read import Reader, SavedWeights
from isograd.checkpoint.write import PHASES, Writing
from isograd.cli.main import main
from isograd.errors import CheckpointError
from isograd.io import store
from isograd.io.store import StorePath, masked, place_of
from tests.checkpoint import toys
from tests.checkpoint.test_writing import OF_EACH, both, ends_at, job, whole
from tests.engine.toys import assert_same_bits

NAMED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")
KEY, SECRET = "AKIATESTTESTTEST", "hiddenhiddenhidden"


class Proxy(BaseHTTPRequestHandler):
    """Between s3fs and the server: what `fault` says of a request is done to it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer, of two writes, takes 40 ms
    target: tuple[str, int]
    fault: Callable[[str, str], str] = staticmethod(lambda method, path: "")
    seen: list[tuple[str, str, int]]

    def _pass(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.seen.append((self.command, self.path, length))
        fault = type(self).fault(self.command, self.path)
        if fault == "slow":
            time.sleep(0.3)
        if fault == "cut":
            self.connection.close()
            self.close_connection = True
            return
        if fault == "500":
            self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
            return
        there = http.client.HTTPConnection(*self.target)
        there.request(self.command, self.path, body, dict(self.headers))
        answer = there.getresponse()
        content = answer.read()
        if fault == "cut after":
            self.connection.close()
            self.close_connection = True
            return
        self._answer(answer.status, dict(answer.getheaders()), content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        headers = {k: v for k, v in headers.items() if k.lower() not in ("transfer-encoding", "connection")}
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content if self.command != "HEAD" else b"")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[type[Proxy]]:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    behind = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    behind.start()
    Proxy.target = behind.get_host_and_port()
    front = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(NAMED, (KEY, SECRET, "us-east-1", f"http://127.0.0.1:{front.server_port}"), strict=True):
            patch.setenv(name, value)
        there = http.client.HTTPConnection(*Proxy.target)
        there.request("PUT", "/bucket", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/b/us-east-1/s3/c"})
        assert there.getresponse().status == 200
        yield Proxy
    front.shutdown()
    front.server_close()
    behind.stop()


@pytest.fixture
def s3(server: type[Proxy], request: pytest.FixtureRequest) -> Iterator[StorePath]:
    server.fault, server.seen = staticmethod(lambda method, path: ""), []
    yield StorePath(f"s3://bucket/{abs(hash(request.node.name))}")
    server.fault = staticmethod(lambda method, path: "")


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.peers)])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    if request.param == "s3":
        found: StorePath = request.getfixturevalue("s3")
        return found
    return StorePath(f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/checkpoints")


def saved(home: StorePath, step: int) -> None:
    """By the job that holds the lock."""
    folder.Lock(home, "j")
    both(home, step)  # type: ignore[arg-type]


def steps_in(home: StorePath) -> list[int]:
    found = folder.checkpoints(home)
    assert all(whole(place, step) for step, place in found)
    return [step for step, _ in found]


@pytest.mark.medium
def test_a_folder_of_a_store_is_kept_as_one_of_a_disk(home: StorePath) -> None:
    """Saved, pruned, replaced, set aside, swept: what is listed is whole."""
    for step in (1, 2, 3):
        saved(home, step)
    assert steps_in(home) == [2, 3]
    for rank in range(2):
        write.write_own(job(home, 4, rank, lambda _: None), lambda: None)  # and then it is killed
    assert steps_in(home) == [2, 3]
    folder.sweep(home)
    assert not any("step-00000004" in name for name in home.tree())
    folder.mark_best(home, 2)
    saved(home, 5)
    saved(home, 6)
    assert steps_in(home) == [2, 5, 6]
    home /= "other"
    saved(home, 3)
    saved(home, 4)
    saved(home, 2)
    assert steps_in(home) == [2]
    assert any(name.endswith("aside-manifest.json") for name in home.tree())
    assert folder.one_of(home) == folder.checkpoints(home)[-1][1]


@pytest.mark.medium
def test_a_later_take_of_a_step_replaces_the_earlier_one(home: StorePath) -> None:
    saved(home, 1)
    first = folder.checkpoints(home)[0][1]
    again = [Writing(_named(job(home, 1, rank, lambda _: None), "j_0002")) for rank in range(2)]
    for one in again:
        one.join()
        assert one.error is None, one.error
    assert folder.checkpoints(home)[0][1] != first and steps_in(home) == [1]
    assert not first.exists()


def _named(found: write.SaveJob, name: str) -> write.SaveJob:
    return replace(found, place=folder.partial(found.folder, found.step, name))


@pytest.mark.medium
def test_a_job_that_another_has_followed_gives_no_name(home: StorePath) -> None:
    saved(home, 1)
    folder.Lock(home, "later")
    with pytest.raises(CheckpointError, match=r"IG931(.|\n)*'later' in its lock"):
        both(home, 2)
    assert steps_in(home) == [1]


def saved_and_resumed(url: str, layout: str, named: dict[str, str]) -> tuple[toys.Run, toys.Run, list[str]]:
    os.environ.update(named)
    engine = toys.engine_of(layout)
    with CheckpointManager(url, engine, keep_last=1) as keeper:
        for step in (1, 2):
            toys.train(engine, step - 1, step, gradients=False)
            keeper.save(step, {"step": step})
    truth = toys.train(engine, 2, 3)
    return truth, toys.resume(url, layout, stop=3), sorted(place_of(url).tree())  # type: ignore[arg-type,union-attr]


@pytest.mark.peers
def test_a_run_resumes_from_a_store_with_the_same_bits(worlds, server, s3: StorePath, capsys) -> None:
    truth, found, names = worlds(2).run(
        saved_and_resumed, s3.url, "dp2 zero1", {name: os.environ[name] for name in NAMED}
    )[0]
    assert found.start == 2 and found.losses == truth.losses
    for mine, theirs in zip(found.gradients, truth.gradients, strict=True):
        assert_same_bits(mine, theirs)
    kept = [name.partition("/")[2] for name in names if name != "lock"]
    assert kept == ["manifest.json", "manifest.sha256", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert main(["ckpt", "verify", s3.url]) == 0
    assert "whole:" in capsys.readouterr().out
    assert SavedWeights(s3.url).has("embed.weight", (101, 24))


@pytest.mark.peers
def test_large_tensors_go_up_and_come_back_in_blocks_side_by_side(
    server, s3: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is that of some blocks: no request, and no answer, is larger than one."""
    block = 5 << 20  # the smallest that S3 takes
    monkeypatch.setattr(store, "BLOCK", block)
    monkeypatch.setattr(write, "PART", 2 * block)
    tensors = {f"model/{i}": torch.randn(1 << 20, generator=torch.Generator().manual_seed(i)) for i in range(6)}
    copies = [write.Copied(key, (1 << 20,), ((0, 1 << 20),), tensor) for key, tensor in tensors.items()]
    head = {"step": 1, "layout": "1", "model": None, "extra": {}}
    head["run"] = {"groups": [], "counters": {}, "loss_scale": None}
    folder.Lock(s3, "j")
    one = Writing(write.SaveJob(s3, folder.partial(s3, 1, "j"), 1, 0, 1, head, copies, {}, 1, None, lambda _: None))
    one.join()
    assert one.error is None, one.error
    reader = Reader(folder.one_of(s3))
    assert len(reader.manifest.files) == 3
    for key, tensor in tensors.items():
        assert torch.equal(reader.read(key), tensor)
    parts = [size for method, path, size in server.seen if method == "PUT" and "partNumber" in path]
    assert max(size for _, _, size in server.seen) <= block + (1 << 20) and len(parts) == 6


# -- killed at any phase ---------------------------------------------------------------------------------------------


def armed_rank(home: StorePath, rank: int, phase: str) -> None:
    gc.disable()  # the parent's connections, collected here, would leave the epoll of both: its answers would be lost
    Writing(job(home, 2, rank, ends_at(phase))).join()
    os._exit(7)


FAST = [(0, "half written"), (0, "listed")]
KILLS = FAST + [
    pytest.param(rank, phase, marks=pytest.mark.medium)
    for rank, phases in enumerate((PHASES[1:], OF_EACH))
    for phase in phases
    if (rank, phase) not in FAST
]


@pytest.mark.peers
@pytest.mark.parametrize(("rank", "phase"), KILLS)
def test_a_rank_that_is_killed_at_any_phase_loses_nothing(s3: StorePath, phase: str, rank: int) -> None:
    saved(s3, 1)
    armed = multiprocessing.get_context("fork").Process(target=armed_rank, args=(s3, rank, phase))
    armed.start()
    other = Writing(job(s3, 2, 1 - rank, lambda _: None))
    armed.join()
    assert armed.exitcode == -signal.SIGKILL
    if phase in OF_EACH[:3]:
        other.given_up.set()
    other.join()
    complete = phase in ("listed", "named", "pruned") or (rank, phase) == (1, "recorded")
    steps = [1, 2] if complete else [1]
    assert steps_in(s3) == steps
    folder.Lock(s3, "k")
    folder.sweep(s3)
    assert {name.partition(".")[0] for name in s3.tree()} == {"lock", *map(folder.name_of, steps)}


# -- the server's own failures ---------------------------------------------------------------------------------------


def failing(times: int, fault: str, method: str, part: str) -> Callable[[str, str], str]:
    left = [times]

    def decide(asked: str, path: str) -> str:
        if asked == method and part in path and left[0] > 0:
            left[0] -= 1
            return fault
        return ""

    return decide


@pytest.mark.peers
@pytest.mark.parametrize("fault", ["500", "cut", "cut after", "slow"])
def test_requests_that_fail_once_are_asked_again(server, s3: StorePath, fault: str) -> None:
    """Of a rank's tensors, of the manifest, and one that reads."""
    ways = [failing(1, fault, *which) for which in (("PUT", "00001.safe"), ("PUT", "manifest.json"), ("GET", "lock"))]
    saved(s3, 1)
    server.fault = staticmethod(lambda method, path: next(filter(None, [way(method, path) for way in ways]), ""))
    saved(s3, 2)
    assert steps_in(s3) == [1, 2]
    assert not any(way("PUT", "00001.safetensors manifest.json") or way("GET", "lock") for way in ways)


@pytest.mark.peers
@pytest.mark.parametrize("part", ["safetensors", pytest.param("00000.json", marks=pytest.mark.medium), "manifest.json"])
def test_a_server_that_refuses_for_good_loses_nothing_and_is_told_without_credentials(
    server, s3: StorePath, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    engine = toys.engine_of("1")
    with CheckpointManager(s3, engine, keep_last=1) as keeper:
        keeper.save(1)
        keeper.wait()
        server.fault = staticmethod(failing(10**6, "500", "PUT", part))
        keeper.save(2)
        with pytest.raises(CheckpointError, match="IG951") as error:
            keeper.wait()
        assert [step for step, _ in folder.checkpoints(s3)] == [1]
        server.fault = staticmethod(lambda method, path: "")
        keeper.save(3)
    assert [step for step, _ in folder.checkpoints(s3)] == [3]
    assert SECRET not in str(error.value) and KEY not in str(error.value)


@pytest.mark.peers
def test_a_store_that_does_not_answer_is_no_damage(server, s3: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a resume would take an older checkpoint."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    engine = toys.engine_of("1")
    with CheckpointManager(s3, engine) as keeper:
        keeper.save(1)
        keeper.save(2)
        keeper.wait()
        server.fault = staticmethod(failing(10**6, "500", "GET", "safetensors"))
        with pytest.raises(CheckpointError, match="IG951"):
            keeper.load()
        server.fault = staticmethod(lambda method, path: "")
        found = keeper.load()
    assert found is not None and found.step == 2 and not found.skipped_damaged


@pytest.mark.peers
def test_bytes_that_change_in_the_store_are_damage(s3: StorePath) -> None:
    engine = toys.engine_of("1")
    with CheckpointManager(s3, engine) as keeper:
        keeper.save(1)
        keeper.save(2)
        keeper.wait()
        file = folder.one_of(s3) / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_whole(bytes(content))
        with pytest.warns(UserWarning, match="damaged"):
            found = keeper.load()
    assert found is not None and found.step == 1


# -- credentials -----------------------------------------------------------------------------------------------------


def test_credentials_are_masked_and_refused_in_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "notforyoureyes")
    said = masked(
        "GET https://me:pass@host/x?X-Amz-Credential=AKIA/2026&X-Amz-Signature=12ab notforyoureyes 'secret': 'abc' b/k"
    )
    assert said == "GET https://***@host/x?X-Amz-Credential=***&X-Amz-Signature=*** *** 'secret': '***' b/k"
    with pytest.raises(CheckpointError, match="IG952") as error:
        place_of("s3://me:pass@bucket/run")
    assert "pass" not in str(error.value)
