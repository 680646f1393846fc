"""isograd check network says what is wrong with machines, and with which ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from isograd.elastic.preflight import MANY, Preflight, RankFacts, RankLink, analyze, connect, connecting, render

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "isograd": "0.1.0"}


def fact(rank: int) -> RankFacts:
    """Two ranks on each machine."""
    host = rank // 2
    return RankFacts(rank, f"host{host}", "gloo", "", "eth0", f"10.0.0.{host + 1}", 4000 + rank, VERSIONS)


def good(ranks: int = 4) -> Preflight:
    return Preflight([fact(rank) for rank in range(ranks)], [], {}, 2e9)


def changed(rank: int, **parts: object) -> Preflight:
    whole = good()
    whole.facts[rank] = replace(whole.facts[rank], **parts)  # type: ignore[arg-type]
    return whole


def test_healthy_machines_have_a_table_and_no_findings() -> None:
    assert analyze(good()) == []
    said = render(good(), []).splitlines()
    assert said[1].split() == ["host0", "0,1", "eth0", "10.0.0.1", "3.11.7", "2.13.0", "0.1.0"]
    assert said[-3] == "a sum over all ranks: 16.00 Gbit/s from and to each"
    assert said[-1] == "nothing is wrong"


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (changed(3, address="127.0.0.1"), "IG293", "the loopback address on rank 3 (host1) (no variable set"),
        (changed(2, address="", variable="GLOO_SOCKET_IFNAME=ib0"), "IG293", "GLOO_SOCKET_IFNAME=ib0: no address"),
        (changed(1, versions=VERSIONS | {"torch": "2.12.1"}), "IG295", "torch 2.12.1 on rank 1 (host0), 2.13.0 on"),
        (replace(good(), joined={3: "a sum of 3"}), "IG297", "rank 3: a sum of 3"),
        (
            replace(good(), broken=[RankLink(3, 2, "TimeoutError: timed out")]),
            "IG292",
            "rank 3 on host1 to rank 2 on host1 (10.0.0.2:4002): TimeoutError: timed out",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("IG") else "",
)
def test_what_is_wrong_is_named_with_its_ranks(found: Preflight, code: str, words: str) -> None:
    [error] = analyze(found)
    assert (error.code, error.exit_code) == (code, 1)
    assert words in str(error.seen)
    assert render(found, [error]).endswith(str(error))


def test_of_many_ranks_one_of_each_machine_connects_to_the_others() -> None:
    assert connecting([fact(rank) for rank in range(4)]) == [0, 1, 2, 3]
    assert connecting([fact(rank) for rank in range(2 * MANY)]) == list(range(0, 2 * MANY, 2))


def test_a_closed_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert connect(0, replace(fact(1), address="127.0.0.1", port=listener.getsockname()[1]), 5.0) == []
    with socket.socket() as bound:  # nobody listens at its port, and nobody else can have it
        bound.bind(("127.0.0.1", 0))
        [link] = connect(0, replace(fact(1), address="127.0.0.1", port=bound.getsockname()[1]), 5.0)
        assert (link.source, link.target) == (0, 1) and "refused" in link.error


def command(*words: str, **place: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isograd", "check", "network", *words], env={**os.environ, **place},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.medium
def test_ranks_of_one_machine_join_a_world_and_time_a_sum(tmp_path: Path) -> None:
    done = command("--nproc", "2")
    assert done.returncode == 0, done.stderr
    ranks, speed, verdict = done.stdout.strip().split("\n\n")
    assert ranks.splitlines()[1].split()[1:4] == ["0,1", "lo", "127.0.0.1"]
    assert float(speed.split()[5]) > 0 and verdict == "nothing is wrong"


@pytest.mark.medium
def test_a_place_where_nobody_listens_is_said_with_the_addresses_of_this_machine() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    done = command("--wait", "2", **place)
    assert done.returncode == 1
    assert "IG290: the place where ranks meet, 127.0.0.1:9, cannot be reached" in done.stderr
    alone = command("--wait", "2", **place | {"RANK": "0", "MASTER_PORT": "29733"})
    assert alone.returncode == 1
    assert "IG291: ranks did not start within 2 s" in alone.stderr or "IG290" in alone.stderr
