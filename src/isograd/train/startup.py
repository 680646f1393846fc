"""What `isograd train` says before it starts: what is trained, where, and the memory needed and the memory there is.

It also refuses, unless `--force` is given, what would make a machine unusable: more ranks than it has devices for, or
more memory than it has; and mistakes that every rank would find. All of this happens in one process, before any rank is
started. `--dry-run` then takes one real step in a folder that is thrown away.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from isograd import __version__
from isograd.checkpoint.folder import checkpoints
from isograd.checkpoint.read import open_whole
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.data import read_tokenizer
from isograd.errors import ConfigError
from isograd.generate import harness
from isograd.io import tempdir, terminal
from isograd.launcher.launch import World
from isograd.plan.memory import LOAD
from isograd.train import language, run_folder, texts
from isograd.train.config import Config
from isograd.train.distillation import teacher_config
from isograd.train.journal import human
from isograd.train.loop import RunOptions, RunOutcome, run
from isograd.train.optimizers import class_of
from isograd.train.resources import PER_CORE, PROGRAM, Forecast, LocalMachine, forecast
from isograd.train.rewards import refuse_reward_model


@dataclass(frozen=True)
class StartupSummary:
    """A run and the machine it would start on."""

    config: Config
    machine: LocalMachine
    needs: Forecast

    @property
    def layout(self) -> Layout:
        """The layout of the config."""
        return Layout.parse(self.config.layout)

    def lines(self, resume: str = "auto") -> list[tuple[str, str]]:
        """(label, text) of each fact."""
        config, layout = self.config, self.layout
        biggest, needs = self.needs.largest, self.needs
        parts = f"states {_gb(biggest.states)}, activations {_gb(biggest.activations)}, program {_gb(PROGRAM)}"
        memory = f"{_gb(needs.rank_bytes)} GB a rank: {parts}; {_gb(needs.all_bytes(layout.world_size))} GB in all"
        if layout.ep > 1:
            memory += f"; a rank's experts compute at most {LOAD:g} times an even share"
        told = config.model
        model = told.preset or told.path or f"a Transformer of {told.options.get('layers', '?')} layers"
        adapters = f" ({human(needs.trained)} of them in adapters, which are trained)"
        size = f"{human(needs.parameters)} parameters{adapters if needs.trained < needs.parameters else ''}"
        ranks = f"{layout.world_size} rank{'' if layout.world_size == 1 else 's'}"
        return [
            ("model", f"{model}, {size} in {told.dtype}"),
            ("layout", f"{layout}: {ranks}"),
            ("devices", f"{ranks} on {self.machine.describe()}"),
            ("batch", _batch(config)),
            ("data", _data(config)),
            ("memory", memory),
            ("folder", _folder(config, resume)),
        ]

    def text(self, columns: int, resume: str = "auto") -> str:
        """The opening as a person reads it, at most `columns` wide."""
        found = [f"isograd {__version__} trains {self.config.run}"]
        found += [terminal.fold(f"  {label:<9}{text}", columns) for label, text in self.lines(resume)]
        return "\n".join(found)

    def problem(self) -> ConfigError | None:
        """Why this machine should not start the run."""
        ranks, most = self.layout.world_size, self.machine.most_ranks
        if ranks > most:
            few = "one rank for each GPU" if self.machine.gpu else f"at most {PER_CORE} ranks for each CPU core"
            return ConfigError(
                "IG652", f"layout {self.config.layout!r} needs {ranks} ranks, and this machine can run {most}",
                seen=self.machine.describe(), expected=few,
                fix="another --layout; or --emit slurm (or k8s, ...) for machines that have them; or --force",
            )  # fmt: skip
        offloaded = self.needs.largest.optimizer if self.config.optimizer.offload else 0.0
        wanted = self.needs.rank_bytes - offloaded if self.machine.gpu else self.needs.all_bytes(ranks)
        if wanted > self.machine.memory:
            whose = f"each of {ranks} ranks" if self.machine.gpu else f"{ranks} ranks together"
            return ConfigError(
                "IG653", f"{whose} would need {_gb(wanted)} GB of memory, and there are {_gb(self.machine.memory)} GB",
                seen=dict(self.lines())["memory"], expected="a run that fits the memory of this machine",
                fix="smaller --batch, more --micro_batches, --model.recompute true, a higher zero stage; or --force",
            )  # fmt: skip
        return None


def summarize(config: Config, machine: LocalMachine) -> StartupSummary:
    """Count everything, which also finds what no rank could build: a layout that does not fit the model."""
    if config.pairs is not None:
        from isograd.train.pairs import refuse_unbuildable

        refuse_unbuildable(config, Layout.parse(config.layout))
    return StartupSummary(config, machine, forecast(config))


def refuse_data(config: Config) -> None:
    """Raise what the ranks would raise later: token shards that are missing, or have ids that the model lacks."""
    if config.data is None or not texts.is_ready(config):
        return  # the rest is built when the run starts
    language.refuse_vocabulary(texts.trained(config), config)


def refuse_early(config: Config, resume: str) -> None:
    """Raise what the ranks would raise: about packages, teacher, folder, the place to resume from, tokenizer."""
    class_of(config.optimizer.name)
    if config.distil is not None:
        teacher_config(config.distil, language.vocabulary(config))
    for reward in config.grpo.rewards if config.grpo is not None else ():
        if reward.path is not None:
            refuse_reward_model(reward.path, language.vocabulary(config), Mesh.unbound("dp1"))
    if config.evaluate.tasks:
        harness.need()
    run_folder.make_folder(config.folder)
    if resume == "never":
        run_folder.refuse_earlier_run(config.checkpoints)
    elif resume != "auto":
        open_whole(resume)
    if config.data is not None and config.log.sample and texts.is_ready(config):
        read_tokenizer(texts.trained(config))  # whose package may be missing: said now, not after the last step


def dry_run(summary: StartupSummary, *, force: bool = False) -> int:
    """Check a run, take its first step where this machine can, keep nothing; the exit code."""
    config = summary.config
    problem = summary.problem()
    refuse_data(config)
    run_folder.refuse_other_config(config.folder)
    if problem is not None and not force:
        print("config, data, model and layout fit each other; no step was taken")
        print("memory is by formula, a bound; isograd rehearse finds the peak of the run's own program")
        print(f"dry run not passed on this machine. {problem}", flush=True)
        return problem.exit_code
    with tempfile.TemporaryDirectory(prefix="dry-", dir=tempdir.home()) as folder:
        quiet = dict.fromkeys(("trackio", "wandb", "mlflow", "metrics_port")) | {"sample": 0, "tensorboard": False}
        update = {
            "run": folder,
            "steps": 1,
            "optimizer": config.optimizer.model_copy(update={"warmup": 0}),
            "log": config.log.model_copy(update=quiet),
            "evaluate": config.evaluate.model_copy(update={"batches": 1}),
        }
        one = config.model_copy(update=update)  # the same run for one step, with nothing sent elsewhere
        texts.prepare(one)
        if config.data is not None:
            print(f"data: {texts.trained(one).describe()}")
        with World(summary.layout.world_size, threads=config.threads, device=config.device) as world:
            outcome: RunOutcome = world.run(run, one, RunOptions(resume="never", show="lines", signals=()))[0]
    if outcome.code:
        print(f"step: {outcome.why}")
        return outcome.code
    print(f"step: taken, loss {outcome.losses[0]:.4f}, saved, evaluated")
    print("dry run passed; nothing was kept")
    return 0


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}" if count < 1e11 else f"{count / 1e9:,.0f}"


def _batch(config: Config) -> str:
    if config.data is None:
        return f"{config.batch} pairs a step, {config.steps} steps"
    if config.pads_rows:
        what = "pairs of answers" if config.grpo is None else f"answers ({config.grpo.answers} to a prompt)"
        return f"{config.batch} {what} of at most {config.data.length} tokens a step, {config.steps} steps"
    tokens = human(config.batch * config.data.length)
    cut = f" in {config.micro_batches} micro-batches" if config.micro_batches > 1 else ""
    return f"{config.batch} sequences x {config.data.length} tokens = {tokens} tokens a step{cut}, {config.steps} steps"


def _data(config: Config) -> str:
    if config.pairs is not None:
        return config.pairs.path
    assert config.data is not None
    names = {
        "stdlib": "Python's standard library", "sums": "built-in sums", "docstrings": "Python's docstrings", None: "",
    }  # fmt: skip
    found = ", ".join(source.path or names[source.builtin] for source in config.data.sources)
    kind = {"chat": "conversations: ", "preference": "pairs of answers: ", "grpo": "prompts: "}.get(config.task, "")
    return kind + found


def _folder(config: Config, resume: str) -> str:
    """The run's folder, and whether the run starts or resumes there."""
    if resume not in ("auto", "never"):
        return f"{config.run}, resumes from {resume}"
    found = checkpoints(config.checkpoints)
    if found and resume == "auto":
        return f"{config.run}, resumes from {config.checkpoint.store or 'checkpoints'}/{found[-1][1].name}"
    return f"{config.run}, " + ("exists" if Path(config.run).exists() else "new")
