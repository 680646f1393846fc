"""Optional places for the numbers beside metrics.jsonl: TensorBoard, trackio, Weights & Biases, MLflow, Prometheus.

Each package is imported only where the config's `log` asks for it. Rank 0 alone sends numbers; events without numbers
are not sent. In wandb a resumed run continues the same run, whose id is made from the folder's path; in trackio and
MLflow it is a new one of the same name.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from isograd.errors import TrainError
from isograd.train.config import Config
from isograd.train.reading import dotted, flat

Sink = Callable[[dict[str, Any]], None]
Send = Callable[[dict[str, float], int], object]
LONGEST = 500  # characters of a parameter that MLflow keeps
NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}  # as Prometheus writes them


def trackers(config: Config, folder: Path, stack: ExitStack) -> list[Sink]:
    """A sink for each tracker that the config asks for; `stack` closes them, as ranks end without Python's own exit."""
    makers: dict[str, Callable[[Config, Path, ExitStack], Send]] = {
        "tensorboard": _tensorboard,
        "trackio": _trackio,
        "wandb": _wandb,
        "mlflow": _mlflow,
        "metrics_port": _prometheus,
    }
    found: list[Sink] = []
    for name, maker in makers.items():
        if getattr(config.log, name):
            try:
                found.append(partial(_send_numbers, maker(config, folder, stack)))
            except ImportError as error:
                raise TrainError(
                    "IG982", f"the config asks for log.{name}, and the package is not installed", seen=str(error),
                    expected=f"the package {name}",
                    fix=f"pip install {name}, or take {name} out of 'log'",
                ) from error  # fmt: skip
    return found


def _send_numbers(send: Send, entry: dict[str, Any]) -> None:
    """Sends a journal entry's numbers by name, those of an event under its name: 'evaluation/loss'."""
    prefix = f"{entry['event']}/" if "event" in entry else ""
    every = {f"{prefix}{k}": v for k, v in entry.items() if k not in ("step", "steps")}
    if numbers := {name: value for name, value in every.items() if isinstance(value, int | float)}:
        send(numbers, entry["step"])


def _tensorboard(_: Config, folder: Path, stack: ExitStack) -> Send:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    stack.callback(writer.close)

    def send(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send


def _trackio(config: Config, folder: Path, stack: ExitStack) -> Send:
    import trackio  # type: ignore[import-not-found, unused-ignore]

    trackio.init(project=config.log.trackio, name=folder.name, config=config.model_dump(mode="json"))
    stack.callback(trackio.finish)
    return lambda numbers, step: trackio.log(numbers, step=step)


def _wandb(config: Config, folder: Path, stack: ExitStack) -> Send:
    import wandb  # type: ignore[import-not-found, unused-ignore]

    run = wandb.init(
        project=config.log.wandb,
        name=folder.name,
        id=sha256(str(folder.resolve()).encode()).hexdigest()[:16],  # so a resumed run continues its line
        resume="allow",
        dir=str(folder),
        config=config.model_dump(mode="json"),
    )

    stack.callback(run.finish)
    run.define_metric("at", hidden=True)
    run.define_metric("*", step_metric="at")
    # wandb's own step must not go back, and a resumed run does some steps again: 'at' is the axis instead
    return lambda numbers, step: run.log({**numbers, "at": step})


def _mlflow(config: Config, folder: Path, stack: ExitStack) -> Send:
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    client = MlflowClient()
    found = client.get_experiment_by_name(config.log.mlflow)
    experiment = found.experiment_id if found is not None else client.create_experiment(config.log.mlflow)
    run = client.create_run(experiment, run_name=folder.name).info.run_id
    stack.callback(client.set_terminated, run)
    for place, value in flat(config):
        if value is not None:
            client.log_param(run, dotted(place), str(value)[:LONGEST])

    def send(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            client.log_metric(run, name, float(value), step=step)

    return send


def _prometheus(config: Config, _: Path, stack: ExitStack) -> Send:
    newest = dict[str, float]()

    class Metrics(BaseHTTPRequestHandler):
        """Answers GET /metrics with the newest numbers in Prometheus' text format, and nothing else."""

        timeout = 2.0  # seconds, after which the connection of a client that asks for nothing is closed

        def do_GET(self) -> None:
            """Answer one request."""
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            texts = {re.sub(r"\W", "_", f"isograd_{k}", flags=re.ASCII): f"{float(v)}" for k, v in [*newest.items()]}
            lines = [f"# TYPE {name} gauge\n{name} {NOT_FINITE.get(text, text)}\n" for name, text in texts.items()]
            body = "".join(lines).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # the client has left
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not on the screen, which belongs to the run."""

    host, port = config.log.metrics_host, config.log.metrics_port
    try:
        server = ThreadingHTTPServer((host, port or 0), Metrics)
    except OSError as error:
        raise TrainError(
            "IG982", "log.metrics_port cannot be opened", seen=f"{host}:{port}: {error.strerror}",
            expected="a free port of this machine, on which rank 0 runs", fix="another --log.metrics_port",
        ) from error  # fmt: skip
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="isograd metrics").start()
    return lambda numbers, step: newest.update(numbers, step=step)
