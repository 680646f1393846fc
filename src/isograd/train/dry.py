"""`isograd train --dry-run`: everything is checked, then one real step is taken in a folder that is thrown away.

A run that this machine cannot hold is checked all the same; its step is left out, and the dry run is not passed.
"""

from __future__ import annotations

import tempfile

from isograd import scratch
from isograd.comm.launch import World
from isograd.train import journal, texts
from isograd.train.config import Config
from isograd.train.job import prepare
from isograd.train.loop import Orders, Outcome, run
from isograd.train.opening import Opening, refuse_data


def dry_run(opening: Opening, *, force: bool = False) -> int:
    """Check a run, take its first step where this machine can, keep nothing; the exit code."""
    config = opening.config
    problem = opening.problem()
    refuse_data(config)
    journal.refuse_other_config(config.folder)
    if problem is not None and not force:
        print(memory_table(opening))
        print("by formula, a bound; `isograd rehearse` finds the peak of the run's own program, without its memory")
        print("config, data, model and layout fit each other; no step was taken", flush=True)
        print(f"dry run not passed on this machine. {problem}", flush=True)
        return problem.exit_code
    with tempfile.TemporaryDirectory(prefix="dry-", dir=scratch.home()) as folder:
        one = _one_step(config, folder)
        prepare(one)
        if config.data is not None:
            print(f"data: {texts.trained(one).describe()}")
        with World(opening.layout.world_size, threads=config.threads) as world:
            outcome: Outcome = world.run(run, one, Orders(resume="never", show="lines", signals=()))[0]
    if outcome.code:
        print(f"step: {outcome.why}")
        return outcome.code
    print(f"step: taken, loss {outcome.losses[0]:.4f}, saved, evaluated")
    print("dry run passed; nothing was kept")
    return 0


def memory_table(opening: Opening) -> str:
    """What a rank of each pipeline stage needs, in GB."""
    names = ("parameters", "gradients", "optimizer", "activations", "total")
    lines = ["memory of a rank, GB" + "".join(f"{name:>13}" for name in names)]
    for number, stage in enumerate(opening.stages):
        values = "".join(f"{getattr(stage, name) / 1e9:13.2f}" for name in names)
        lines.append(f"  {f'pipeline stage {number}':<18}" + values)
    return "\n".join(lines)


def _one_step(config: Config, folder: str) -> Config:
    """The same run for one step, in a folder of its own, with nothing sent elsewhere."""
    quiet = {"sample": 0, "tensorboard": False, "trackio": None, "wandb": None, "mlflow": None}
    return config.model_copy(
        update={
            "run": folder,
            "steps": 1,
            "optimizer": config.optimizer.model_copy(update={"warmup": 0}),
            "log": config.log.model_copy(update=quiet),
            "evaluate": config.evaluate.model_copy(update={"batches": 1}),
        }
    )
