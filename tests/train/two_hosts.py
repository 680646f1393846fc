"""Two machines, imitated by two network namespaces that a virtual cable joins.

As a program, this is what their ranks run under torchrun when the cable is to be cut at a chosen place:

    torchrun ... two_hosts.py run.yaml forward|reduction|save FOLDER

Every rank stops at that place of step 3 until the file FOLDER/cut is there, and goes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP = 2  # before which so many are done


@dataclass
class Host:
    """One of the two, with the environment of its ranks."""

    number: int
    space: str
    address: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        """A program on this host, which has a name of its own; its output goes into a file."""
        inside = ["ip", "netns", "exec", self.space, "unshare", "-u", "sh", "-c"]
        text = f'hostname host-{"ab"[self.number]}; exec "$0" "$@"'
        out = (self.folder / f"{'ab'[self.number]}.txt").open("a")
        return subprocess.Popen(
            [*inside, text, *words], cwd=self.folder, env={**os.environ, **self.env}, stdout=out, stderr=out, text=True
        )

    def said(self) -> str:
        file = self.folder / f"{'ab'[self.number]}.txt"
        return file.read_text() if file.exists() else ""


def missing() -> str:
    """Why this machine cannot imitate two; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    if shutil.which("ip") is None:
        return "no program ip"
    tried = subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", f"try{os.getpid()}"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()[:100]}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """host-a (10.9.0.1) and host-b (10.9.0.2)."""
    spaces = [f"iso{name}{os.getpid()}" for name in "ab"]
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, module in (("torchrun", "torch.distributed.run"), ("isograd", "isograd")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", "va", "netns", spaces[0], "type", "veth", "peer", "name", "vb", "netns", spaces[1])
        hosts = []
        for number, space in enumerate(spaces):
            wire, address = f"v{'ab'[number]}", f"10.9.0.{number + 1}"
            ip("-n", space, "addr", "add", f"{address}/24", "dev", wire)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", wire, "up")
            env = {"PATH": f"{programs}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": wire, "OMP_NUM_THREADS": "1",
                   "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29611", "NODE_RANK": str(number)}  # fmt: skip
            hosts.append(Host(number, space, address, folder, env))
        yield hosts[0], hosts[1]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def cut(host: Host) -> None:
    """Pull the cable out of host-a."""
    ip("-n", host.space, "link", "set", "va", "down")


def worker(config: str, place: str, folder: Path) -> int:
    """A rank that waits at a place until the cable is cut."""
    from isograd.engine.reducer import Reducer
    from isograd.errors import IsogradError
    from isograd.train import loop
    from isograd.train.reading import load
    from isograd.train.task import TrainingTask

    rank, reached = os.environ["RANK"], [0]

    def here() -> None:
        (folder / f"here-{rank}").touch()
        end = time.monotonic() + 120
        while not (folder / "cut").exists() and time.monotonic() < end:
            time.sleep(0.1)

    def arm(step: int, task: TrainingTask) -> None:
        reached[0] = step
        if step == STEP and place == "forward":
            task.model.register_forward_pre_hook(lambda *_: here())
            pipeline = task.engine.pipeline
            if pipeline is not None:
                here()

    launch = Reducer.launch

    def launching(self: Reducer, *given: Any) -> None:
        if place == "reduction" and reached[0] == STEP:
            here()
        launch(self, *given)

    Reducer.launch = launching  # type: ignore[method-assign]
    keeper = loop.CheckpointManager

    def with_phase(*given: object, **named: object) -> object:
        def phase(now: str) -> None:
            if place == "save" and now == "half written":
                here()

        return keeper(*given, phase=phase, **named)  # type: ignore[arg-type]

    loop.CheckpointManager = with_phase  # type: ignore[assignment,misc]
    try:
        return loop.run(load(config, [], []).config, loop.RunOptions(show="lines", before_step=arm)).code
    except IsogradError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
