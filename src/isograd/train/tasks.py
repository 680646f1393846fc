"""Which task a config asks for."""

from __future__ import annotations

from isograd.core.mesh import Mesh
from isograd.train.config import Config
from isograd.train.task import ProgressCallback, TrainingTask


def make_task(config: Config, mesh: Mesh, beat: ProgressCallback) -> TrainingTask:
    """The task that a config asks for: token sequences (of texts or conversations), pairs of answers,
    or of texts, prompts with rewards."""
    if config.pairs is not None:
        from isograd.train.pairs import PairsTask

        return PairsTask(config, mesh)
    if config.task == "grpo":
        from isograd.train.grpo import GrpoTask

        return GrpoTask(config, mesh, beat)
    if config.task == "preference":
        from isograd.train.preference import PreferenceTask

        return PreferenceTask(config, mesh, beat)
    from isograd.train.language import LanguageTask

    return LanguageTask(config, mesh)
