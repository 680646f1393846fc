"""Optional places for the numbers beside metrics.jsonl: TensorBoard, trackio, Weights & Biases, MLflow.

Each is a package of its own, imported only where the config's `log` asks for it, and an extra of isograd. Rank 0 alone
sends numbers. Where they go is the package's to say: WANDB_MODE=offline and MLFLOW_TRACKING_URI=... work as usual. In
wandb a resumed run continues the same run, whose id is made from the folder's path; in trackio and MLflow it is a new
one of the same name. Events without numbers are not sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from isograd.errors import TrainError
from isograd.train.config import Config
from isograd.train.reading import dotted, flat

Sink = Callable[[dict[str, Any]], None]
LONGEST = 500  # characters of a parameter that MLflow keeps


def trackers(config: Config, folder: Path, stack: ExitStack) -> list[Sink]:
    """A sink for each tracker that the config asks for; `stack` closes them, as ranks end without Python's own exit."""
    makers: dict[str, Callable[[Config, Path, ExitStack], Sink]] = {
        "tensorboard": _tensorboard,
        "trackio": _trackio,
        "wandb": _wandb,
        "mlflow": _mlflow,
    }
    found = []
    for name, maker in makers.items():
        if getattr(config.log, name):
            try:
                found.append(maker(config, folder, stack))
            except ImportError as error:
                raise TrainError(
                    "IG982", f"the config asks for log.{name}, and the package is not installed", seen=str(error),
                    expected=f"the package {name}",
                    fix=f"pip install {name}, or take {name} out of 'log'",
                ) from error  # fmt: skip
    return found


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    """A journal entry's numbers by name, those of an event under its name: 'evaluation/loss'."""
    prefix = f"{entry['event']}/" if "event" in entry else ""
    return {f"{prefix}{k}": v for k, v in entry.items() if k not in ("step", "steps") and isinstance(v, int | float)}


def _tensorboard(_: Config, folder: Path, stack: ExitStack) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    stack.callback(writer.close)

    def sink(entry: dict[str, Any]) -> None:
        """Send the numbers of one journal entry."""
        for name, value in _numbers(entry).items():
            writer.add_scalar(name, value, entry["step"])
        writer.flush()

    return sink


def _trackio(config: Config, folder: Path, stack: ExitStack) -> Sink:
    import trackio  # type: ignore[import-not-found, unused-ignore]

    trackio.init(project=config.log.trackio, name=folder.name, config=config.model_dump(mode="json"))
    stack.callback(trackio.finish)

    def sink(entry: dict[str, Any]) -> None:
        """Send the numbers of one journal entry."""
        if numbers := _numbers(entry):
            trackio.log(numbers, step=entry["step"])

    return sink


def _wandb(config: Config, folder: Path, stack: ExitStack) -> Sink:
    import wandb  # type: ignore[import-not-found, unused-ignore]

    run = wandb.init(
        project=config.log.wandb,
        name=folder.name,
        id=sha256(str(folder.resolve()).encode()).hexdigest()[
            :16
        ],  # of the folder, so a resumed run continues its line
        resume="allow",
        dir=str(folder),
        config=config.model_dump(mode="json"),
    )

    stack.callback(run.finish)
    run.define_metric("at", hidden=True)
    run.define_metric("*", step_metric="at")

    def sink(entry: dict[str, Any]) -> None:
        """Send the numbers of one journal entry."""
        # wandb's own step must not go back, and a resumed run does some steps again: 'at' is the axis instead
        if numbers := _numbers(entry):
            run.log({**numbers, "at": entry["step"]})

    return sink


def _mlflow(config: Config, folder: Path, stack: ExitStack) -> Sink:
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    client = MlflowClient()
    found = client.get_experiment_by_name(config.log.mlflow)
    experiment = found.experiment_id if found is not None else client.create_experiment(config.log.mlflow)
    run = client.create_run(experiment, run_name=folder.name).info.run_id
    stack.callback(client.set_terminated, run)
    for place, value in flat(config):
        if value is not None:
            client.log_param(run, dotted(place), str(value)[:LONGEST])

    def sink(entry: dict[str, Any]) -> None:
        """Send the numbers of one journal entry."""
        for name, value in _numbers(entry).items():
            client.log_metric(run, name, float(value), step=entry["step"])

    return sink
