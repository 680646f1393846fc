"""isograd check network: before a run, on all of its machines.

torchrun waits for the torchrun of every other machine before it starts anything, for minutes and without a word. With
--nnodes this starts its ranks at once, so that a machine which never comes is named after --wait seconds.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

from isograd.cli.subcommands import run
from isograd.errors import NetworkError

FOUND = 1  # exit code
EXAMPLES = """on every machine, with its own number behind --node-rank:
  isograd check network --nnodes 2 --nproc 8 --node-rank 0 --master-addr node1
    --master-port 29500

or by the launcher of the run itself (torchrun waits for all machines first):
  torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr node1
    --master-port 29500 --no-python -- isograd check network

exit codes: 0 nothing is wrong, 1 something is, 2 wrong usage"""


def check(words: list[str]) -> int:
    """`isograd check`; the exit code."""
    about = "Look at the machines of a run before it starts."
    verbs = {"network": ("connections of all ranks, the bandwidth of a sum, and versions", _options, _network)}
    return run(words, "check", about, EXAMPLES, verbs)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start here, outside of torchrun (default 2)")
    parser.add_argument("--nnodes", type=int, default=1, help="machines on which this command is started (default 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them this is, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="name or address of machine 0, where ranks meet")
    parser.add_argument("--master-port", type=int, default=29500, metavar="PORT", help="a free port of it (29500)")
    parser.add_argument("--wait", type=float, default=20.0, metavar="S", help="seconds to wait for a rank (default 20)")


def _network(options: argparse.Namespace) -> int:
    if "RANK" not in os.environ:
        return _start(options)
    from isograd.elastic.preflight import analyze, preflight, render

    try:
        found, notes = preflight(options.wait)
    except NetworkError as error:
        if error.code == "IG291" and os.environ.get("LOCAL_RANK", "0") != "0":  # the first rank here says it
            return _end(FOUND)
        raise
    errors = analyze(found)
    if notes.rank:
        notes.put("left", True)
    else:
        print(render(found, errors), flush=True)
        notes.gather("left", True)  # the store may lie in this process
    return _end(FOUND if errors else 0)


def _end(code: int) -> int:
    """Leave, although a thread may still wait for a world that does not come about."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(options: argparse.Namespace) -> int:
    """This machine's ranks; the code of the first that fails."""
    nodes, number, each = options.nnodes, options.node_rank, options.nproc
    if nodes > 1 and not (options.master_addr and 0 <= number < nodes):
        seen = f"--nnodes {nodes} --node-rank {number} --master-addr {options.master_addr}"
        raise NetworkError("IG298", seen=seen, expected=f"--master-addr, and a --node-rank from 0 to {nodes - 1}")
    place = {"MASTER_ADDR": options.master_addr or "", "MASTER_PORT": str(options.master_port)}
    if nodes == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        place["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    place["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")  # not torch's stacks beside an error
    place |= {"WORLD_SIZE": str(nodes * each), "LOCAL_WORLD_SIZE": str(each), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "isograd", *sys.argv[1:]]
    running = [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": str(number * each + here), "LOCAL_RANK": str(here)}
        )
        for here in range(each)
    ]
    return next((code for code in [one.wait() for one in running] if code), 0)
