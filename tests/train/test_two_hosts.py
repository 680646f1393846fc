"""Runs on two machines, as two_hosts.py imitates them: the losses of one, and what is said when the cable is cut."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import isograd
from tests.train.two_hosts import cut, ip, missing, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

NETWORK_S = 20.0
RUN = """version: 1
run: {folder}/{name}
layout: {layout}
model: {{preset: tiny-llama, options: {{vocab: 257}}, dtype: fp64}}
data: {{sources: [{{path: {text}}}], length: 12}}
optimizer: {{lr: 1e-2}}
steps: 6
batch: 8
micro_batches: {micro}
checkpoint: {{every: 3}}
log: {{sample: 0}}
resilience: {{network_s: {network_s}}}
"""
LAYOUTS = {"dp2 tp2": 1, "pp2 dp2 zero1": 2}


def config(folder: Path, text: Path, layout: str, name: str = "run") -> Path:
    file = folder / f"{name}.yaml"
    micro = LAYOUTS.get(layout, 1)
    values = {"folder": folder, "name": name, "layout": layout, "text": text, "micro": micro, "network_s": NETWORK_S}
    file.write_text(RUN.format(**values))
    return file


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "grad_norm" in line]


def test_runs_on_two_machines_have_the_losses_of_one(tmp_path: Path, text: Path) -> None:
    """By the script of --emit torchrun, run on both."""
    with two_hosts(tmp_path) as hosts:
        alone = hosts[0].start(["isograd", "train", str(config(tmp_path, text, "dp1", "alone"))])
        assert alone.wait(300) == 0
        for number, layout in enumerate(LAYOUTS):
            name = f"run{number}"
            file = config(tmp_path, text, layout, name)
            emit = ["isograd", "train", str(file), "--emit", "torchrun", "--nodes", "2", "--cpus", "1"]
            script = subprocess.run(
                emit, env={**os.environ, **hosts[0].env}, capture_output=True, text=True, check=True
            ).stdout
            (tmp_path / "start.sh").write_text(script)
            running = [host.start(["bash", "start.sh"]) for host in hosts]
            assert [one.wait(300) for one in running] == [0, 0], hosts[0].said()[-3000:]
            assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "place"), [("pp2 dp2 zero1", "forward"), ("dp2 tp2", "reduction"), ("dp2 tp2", "save")]
)
def test_a_cut_cable_ends_both_sides_in_time_with_what_they_did(
    tmp_path: Path, text: Path, layout: str, place: str
) -> None:
    """FAILURES B9, and shorter: 20 s, not `safety.stall_s`."""
    file = config(tmp_path, text, layout)
    with two_hosts(tmp_path) as hosts:
        worker = str(Path(__file__).with_name("two_hosts.py"))
        running = [
            host.start(
                ["torchrun", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={host.number}",
                 "--master-addr=10.9.0.1", "--master-port=29611", worker, str(file), place, str(tmp_path)]
            )
            for host in hosts
        ]  # fmt: skip
        try:
            end = time.monotonic() + 200
            while len(list(tmp_path.glob("here-*"))) < 4 and time.monotonic() < end:
                time.sleep(0.5)
            cut(hosts[0])
            began = time.monotonic()
            (tmp_path / "cut").touch()
            took: dict[int, float] = {}
            while len(took) < 2 and time.monotonic() < began + 60:
                for host in hosts:
                    if "IG979" in host.said():
                        took.setdefault(host.number, time.monotonic() - began)
                time.sleep(0.5)
            ended = {}
            while len(ended) < 2 and time.monotonic() < began + 90:
                ended |= {at: time.monotonic() - began for at in (0, 1) if at not in ended and running[at].poll()}
                time.sleep(0.5)
        finally:
            for one in running:
                one.terminate()
            for one in running:
                one.wait(60)
    print(f"{layout}, {place}: said after {took} s, torchrun ended after {ended} s")
    for host, other in zip(hosts, reversed(hosts), strict=True):
        said = host.said()
        assert took.get(host.number, 99.0) <= NETWORK_S, said[-4000:]
        name, away = f"host-{'ab'[host.number]}", f"host-{'ab'[other.number]}"
        doing = r"(.*in step 3|.* step 4|saving|evaluating.*)"
        assert re.search(rf"IG979: other machines are out of reach, for 1?[0-9]+ s, while {doing}", said)
        assert f"check the network between {name} and {away}" in said
        assert re.search(rf"where: +rank \d \(.*\) on {name}", said)
        assert re.search(r"this rank (waits in \w+.*, called in \w+/\w+\.py:\d+|was not in a collective)", said)


def checked(hosts, **env: str) -> tuple[list[int], str]:
    """`isograd check network` on both, the second one with a changed environment."""
    before = len(hosts[0].said())
    hosts[1].env |= env
    running = [
        host.start(
            ["torchrun", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={host.number}", "--master-addr=10.9.0.1",
             "--master-port=29611", "--no-python", "--", "isograd", "check", "network", "--wait", "15"]
        )
        for host in hosts
    ]  # fmt: skip
    return [one.wait(200) for one in running], hosts[0].said()[before:]


def test_the_network_between_two_machines_is_checked_and_what_is_wrong_is_named(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        codes, said = checked(hosts)
        print(said)
        assert codes == [0, 0]
        assert "nothing is wrong" in said
        other = tmp_path / "other"
        shutil.copytree(Path(isograd.__file__).parent, other / "isograd", ignore=shutil.ignore_patterns("__pycache__"))
        (other / "isograd" / "core" / "loss_terms.py").open("a").write("# edited")
        before = hosts[1].env["GLOO_SOCKET_IFNAME"]
        codes, said = checked(hosts, PYTHONPATH=str(other), GLOO_SOCKET_IFNAME="")
        print(said)
        assert 0 not in codes
        assert re.search(r"IG295: versions differ between ranks\n +seen: +isograd \S+ \(\w+\) on rank \d", said)
        assert re.search(r"IG293: .*\n +seen: +the loopback address on rank 1 \(host-b\)", said)
        ip("-n", hosts[1].space, "rule", "add", "pref", "10", "ipproto", "tcp", "dport", "29611", "lookup", "main")
        ip("-n", hosts[1].space, "rule", "add", "pref", "11", "to", "10.9.0.1", "ipproto", "tcp", "prohibit")
        codes, said = checked(hosts, PYTHONPATH=os.environ["PYTHONPATH"], GLOO_SOCKET_IFNAME=before)
        print(said)
        assert 0 not in codes
        assert re.search(r"IG292: .*\n +seen: .*rank 1 on host-b to rank 0 on host-a \(10.9.0.1:", said)
