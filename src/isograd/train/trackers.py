"""Optional places for the numbers beside metrics.jsonl: TensorBoard's files, a trackio project."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from isograd.errors import TrainError
from isograd.train.config import Config

Sink = Callable[[dict[str, Any]], None]


def trackers(config: Config, folder: Path) -> list[Sink]:
    found: list[Sink] = []
    if config.log.tensorboard:
        found.append(_tensorboard(folder))
    if config.log.trackio:
        found.append(_trackio(config))
    return found


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    prefix = f"{entry['event']}/" if "event" in entry else ""
    return {f"{prefix}{k}": v for k, v in entry.items() if k not in ("step", "steps") and isinstance(v, int | float)}


def _tensorboard(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard") from error
    writer = SummaryWriter(str(folder / "tensorboard"))

    def sink(entry: dict[str, Any]) -> None:
        for name, value in _numbers(entry).items():
            writer.add_scalar(name, value, entry["step"])
        writer.flush()

    return sink


def _trackio(config: Config) -> Sink:
    try:
        import trackio  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise _missing("trackio") from error
    trackio.init(project=config.log.trackio, name=config.folder.name, config=config.model_dump(mode="json"))

    def sink(entry: dict[str, Any]) -> None:
        trackio.log(_numbers(entry), step=entry["step"])

    return sink


def _missing(name: str) -> TrainError:
    return TrainError(
        "IG982", f"{name} is asked for and not installed", expected=f"the package {name}",
        fix="pip install 'isograd[track]', or take it out of 'log'",
    )  # fmt: skip
