"""The numbers of a run reach the trackers that its config names; a missing package says which extra to install."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sqlite3
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from isograd.errors import TrainError
from isograd.train import loop, run_folder
from isograd.train.config import Config
from isograd.train.task import TrainingTask
from isograd.train.trackers import trackers
from tests.train.test_loop import QUIET, config_of, losses

STEP = {"step": 3, "steps": 9, "loss": 1.25, "lr": 1e-3, "unit": "tokens", "mfu": None, "skipped": False}
SAID = {"step": 3, "event": "note", "text": "no number"}
HELD = {"step": 3, "event": "evaluation", "loss": 2.5, "weight": 40.0, "unit": "tokens"}


def config(**log: Any) -> Config:
    return Config.model_validate(
        {"run": "runs/a", "model": {"preset": "tiny-llama"}, "data": {"sources": [{"builtin": "stdlib"}], "length": 8},
         "optimizer": {"lr": 1e-3}, "steps": 9, "batch": 1, "log": log}
    )  # fmt: skip


def send(run: Config, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        (sink,) = trackers(run, folder, stack)
        for entry in (STEP, SAID, HELD):
            sink(entry)


@pytest.mark.parametrize(
    ("field", "package"),
    [("tensorboard", "tensorboard"), ("trackio", "trackio"), ("wandb", "wandb"), ("mlflow", "mlflow")],
)
def test_a_package_that_is_missing_is_named_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(TrainError, match=f"IG982: the config asks for log.{field}") as caught:
        trackers(config(**{field: True if field == "tensorboard" else "p"}), tmp_path, ExitStack())
    assert caught.value.fix is not None
    assert caught.value.fix.startswith(f"pip install {package}")


class Recorded:
    """Stands in for a package: remembers what was called with what."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return self.answers.get(name, self)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


def test_wandb_gets_the_config_and_every_number_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a recorded stand-in, so that the calls are checked where wandb is not installed."""
    package = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", package)
    for _ in range(2):  # a resumed run continues under the same id
        send(config(wandb="project"), tmp_path / "a")
    (_, first), (_, second) = package.of("init")
    assert (first["project"], first["name"], first["resume"]) == ("project", "a", "allow")
    assert first["id"] == second["id"]
    assert first["config"]["optimizer"]["lr"] == 1e-3
    assert package.of("log")[0][0] == ({"loss": 1.25, "lr": 1e-3, "skipped": False, "at": 3},)
    assert package.of("log")[1][0] == ({"evaluation/loss": 2.5, "evaluation/weight": 40.0, "at": 3},)
    assert len(package.of("finish")) == 2  # a rank ends without Python's exit handlers


def test_mlflow_gets_the_config_and_every_number_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a recorded stand-in, so that the calls are checked where MLflow is not installed."""
    made = SimpleNamespace(info=SimpleNamespace(run_id="r"))
    client = Recorded(get_experiment_by_name=None, create_experiment="7", create_run=made)
    tracking = ModuleType("mlflow.tracking")
    tracking.MlflowClient = lambda: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    send(config(mlflow="experiment"), tmp_path / "a")
    assert client.of("create_experiment") == [(("experiment",), {})]
    assert client.of("create_run") == [(("7",), {"run_name": "a"})]
    assert (("r", "optimizer.lr", "0.001"), {}) in client.of("log_param")
    sent = {args[1]: (args[2], options["step"]) for args, options in client.of("log_metric")}
    assert sent == {
        "loss": (1.25, 3), "lr": (1e-3, 3), "skipped": (0.0, 3),
        "evaluation/loss": (2.5, 3), "evaluation/weight": (40.0, 3),
    }  # fmt: skip
    assert client.of("set_terminated") == [(("r",), {})]


@pytest.mark.peers
def test_wandb_itself_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setitem(os.environ, "WANDB_MODE", "offline")
    send(config(wandb="project"), tmp_path / "a")
    run_folder.make_folder(tmp_path / "a")  # a resumed run finds links that wandb made
    (written,) = (tmp_path / "a" / "wandb").glob("offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while b"evaluation/loss" not in written.read_bytes():  # a process of wandb's own writes it, also after `finish`
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.peers
def test_trackio_itself_writes_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRACKIO_DIR", str(tmp_path / "store"))  # read when trackio is imported
    pytest.importorskip("trackio")
    send(config(trackio="project"), tmp_path / "a")
    with closing(sqlite3.connect(tmp_path / "store" / "project.db")) as database:
        sent = [(step, json.loads(metrics)) for step, metrics in database.execute("select step, metrics from metrics")]
    assert [(step, found.get("loss"), found.get("evaluation/loss")) for step, found in sent] == [
        (3, 1.25, None),
        (3, None, 2.5),
    ]


def test_mlflow_itself_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setitem(os.environ, "MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setitem(os.environ, "MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    send(config(mlflow="experiment"), tmp_path / "a")
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["evaluation/loss"] == 2.5
    assert run.data.params["optimizer.lr"] == "0.001"


@pytest.mark.peers
def test_tensorboard_itself_writes_a_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    send(config(tensorboard=True), tmp_path / "a")
    (written,) = (tmp_path / "a" / "tensorboard").glob("events.out.tfevents.*")
    assert b"evaluation/loss" in written.read_bytes()


LINE = re.compile(r"# TYPE (isograd_\w+) gauge\n\1 (NaN|[+-]Inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\n", re.ASCII)


def asked(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, dict[str, float]]:
    """(status, type, numbers by name) of an answer, of which every byte is read."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as line:
        line.request(method, path)
        answer = line.getresponse()
        text = answer.read().decode()
    found = LINE.findall(text) if answer.status == 200 else []
    assert answer.status != 200 or LINE.sub("", text) == ""
    assert len(dict(found)) == len(found)
    return answer.status, answer.headers["Content-Type"], {name: float(value) for name, value in found}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_prometheus_reads_a_run_step_by_step(text: Path, tmp_path: Path) -> None:
    port, seen = free_port(), list[tuple[float, float, float]]()

    def look(step: int, _: TrainingTask) -> None:
        found = asked(port)[2]
        if step:
            seen.append((found["isograd_step"], found["isograd_loss"], found["isograd_goodput"]))

    run = config_of(tmp_path / "run", text, log={"metrics_port": port, "sample": 0})
    assert loop.run(run, replace(QUIET, before_step=look)).code == 0
    expected = [(step, loss, 1.0) for step, loss in enumerate(losses(tmp_path / "run"), 1)]
    assert seen == expected[:-1]
    with pytest.raises(ConnectionRefusedError):
        asked(port)


def test_prometheus_reads_the_newest_numbers_while_the_run_lasts(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        (sink,) = trackers(config(metrics_port=port), tmp_path, stack)
        assert asked(port)[::2] == (200, {})
        for entry in (STEP, SAID, HELD, {**STEP, "step": 4, "loss/a b": -1e-7, "per_s": math.inf, "lr": math.nan}):
            sink(entry)
        status, kind, found = asked(port)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert math.isnan(found.pop("isograd_lr"))
        assert found == {
            "isograd_step": 4, "isograd_loss": 1.25, "isograd_skipped": 0, "isograd_evaluation_loss": 2.5,
            "isograd_evaluation_weight": 40, "isograd_loss_a_b": -1e-7, "isograd_per_s": math.inf,
        }  # fmt: skip
        with ExitStack() as silent:  # connections that ask for nothing keep nobody waiting
            for _ in range(8):
                silent.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"GET /met")
            assert asked(port)[0] == 200
        assert asked(port, "/")[0] == asked(port, "/metrics/../etc/passwd")[0] == 404
        assert asked(port, method="POST")[0] == asked(port, method="HEAD")[0] == 501
        with pytest.raises(TrainError, match=rf"IG982(.|\n)*127\.0\.0\.1:{port}: Address already in use"):
            trackers(config(metrics_port=port), tmp_path, ExitStack())
    with pytest.raises(ConnectionRefusedError):
        asked(port)
    with ExitStack() as stack:  # at once again, as when a rank has died
        trackers(config(metrics_port=port), tmp_path, stack)
        assert asked(port)[0] == 200
