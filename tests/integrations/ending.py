"""Pairs of ranks that end as a program does whose exception nobody catches: test_ending.py runs this, in a process.

    python -m tests.integrations.ending trainer|lightning OUT.json

Libraries are imported once; the two ranks of each case are forked from here, before any thread or group is there.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import isograd as ig
from isograd.comm import world
from tests.integrations.worlds import free_port

PLACES = ("loss", "callback", "loader")
LAYOUTS = (None, "zero1", "zero3")
LIMIT = 40.0  # seconds in which both ranks have ended


class Halt(Exception):
    """Of a user's code."""


def fault(place: str, at: str, failing: int, step: int) -> None:
    """Raises in the second step of one rank."""
    if place == at and world.world()[0] == failing and step == 1:
        raise Halt(f"a bad {place}")


def by_trainer(at: str, layout: str | None, failing: int, folder: str) -> None:
    from transformers import Trainer, TrainerCallback

    from tests.integrations import toys

    class Rows(toys.Rows):
        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            fault("loader", at, failing, made.state.global_step if made else 0)
            return super().__getitem__(row)

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            fault("callback", at, failing, state.global_step)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert made is not None
        fault("loss", at, failing, made.state.global_step)
        return toys.exact(outputs, labels, num_items_in_batch)

    made: Any = None
    made_class = ig.integrations.trainer(Trainer, layout)
    made = made_class(
        toys.model(), toys.arguments(folder, 2, 2, max_steps=6, dataloader_pin_memory=False),
        train_dataset=Rows(), callbacks=[Fails()], compute_loss_func=loss,
    )  # fmt: skip
    made.train()


def by_lightning(at: str, layout: str | None, failing: int, folder: str) -> None:
    import lightning.pytorch as lightning
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, row: int) -> torch.Tensor:
            fault("loader", at, failing, trainer.global_step)
            return torch.full((6,), float(row))

    class Fails(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            fault("callback", at, failing, trainer.global_step)

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            out = self.net(batch).square().mean()
            fault("loss", at, failing, trainer.global_step)
            return {"loss": out, "weight": len(batch)}

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    trainer = lightning.Trainer(
        default_root_dir=folder, strategy=ig.integrations.LightningStrategy(layout), callbacks=[Fails()], max_steps=6,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", devices=2,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(Rows(), batch_size=2))


LOOPS = {"trainer": by_trainer, "lightning": by_lightning}


def rank_of(rank: int, port: int, said: Path, loop: str, *case: Any) -> None:
    """A forked rank: ends as an interpreter does."""
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "ACCELERATE_USE_CPU": "true"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "ending", "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in told.items()})
    ended = 0
    try:
        LOOPS[loop](*case)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        ended = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)


def pair(loop: str, at: str, layout: str | None, failing: int) -> dict[str, Any]:
    """What the two ranks of one case have said, and their exit codes; -9 where one had to be killed."""
    scratch = tempfile.mkdtemp()  # not a TemporaryDirectory, which the ranks' ends would remove
    port, said = free_port(), [Path(scratch, str(rank)) for rank in range(2)]
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            rank_of(rank, port, said[rank], loop, at, layout, failing, scratch)
    began, codes = time.monotonic(), {}
    while len(codes) < 2:
        for rank, process in enumerate(ranks):
            if rank in codes:
                continue
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() - began > LIMIT:
                os.kill(process, 9)
                os.waitpid(process, 0)
                codes[rank] = -9
        time.sleep(0.02)
    words = [path.read_text()[-6000:] for path in said]
    shutil.rmtree(scratch)
    return {"codes": [codes[0], codes[1]], "said": words, "seconds": time.monotonic() - began}


def main() -> None:
    """Every place, stage and failing rank."""
    loop, out = sys.argv[1:]
    import transformers  # noqa: F401

    if loop == "lightning":
        import lightning.pytorch  # noqa: F401
    else:
        from transformers import GPT2LMHeadModel, Trainer  # noqa: F401
    ig.integrations.LightningStrategy if loop == "lightning" else ig.integrations.trainer  # noqa: B018
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # which imports torch's compiler
    cases = [(at, layout, failing) for at in PLACES for layout in LAYOUTS for failing in (0, 1)]
    found = {f"{at} {layout} {failing}": pair(loop, at, layout, failing) for at, layout, failing in cases}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
