"""isograd check network: before a run, on all of its machines.

isograd check network --nproc 4                                       ranks of this machine alone
torchrun --nnodes 2 --nproc-per-node 8 ... --no-python -- isograd check network run.yaml my_code/
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from isograd.verbs import Parser, run

FOUND = 1  # exit code
EXAMPLES = """under torchrun, on every machine:
  torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr node1
    --master-port 29500 --no-python -- isograd check network run.yaml

exit codes: 0 nothing is wrong, 1 something is, 2 wrong usage"""


def check(words: list[str], kind: Parser) -> int:
    """`isograd check`; the exit code."""
    about = "Look at the machines of a run before it starts."
    verbs = {"network": ("latency, bandwidth, clocks, versions and code of all pairs of ranks", _options, _network)}
    return run(words, kind, "check", about, EXAMPLES, verbs)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", type=Path, help="code and configs that must be the same on every machine")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start here, outside of torchrun (default 2)")
    parser.add_argument("--wait", type=float, default=20.0, metavar="S", help="seconds to wait for a rank (default 20)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _network(options: argparse.Namespace) -> int:
    if "RANK" not in os.environ:
        return _start(options.nproc)
    from isograd.network.judge import as_json, judge, text
    from isograd.network.survey import survey

    found, rank, store = survey(options.paths, options.wait)
    if found is None:
        code = store.get("code", 6 * options.wait)
        store.put(f"left/{rank}", True)
        return _end(FOUND if code is None else int(code))
    errors = judge(found)
    print(json.dumps(as_json(found, errors), indent=1) if options.json else text(found, errors), flush=True)
    code = FOUND if errors else 0
    store.put("code", code)
    for other in range(1, len(found.facts)):  # the store may lie in this process
        store.get(f"left/{other}", options.wait)
    return _end(code)


def _end(code: int) -> int:
    """Leave, although a thread may still wait for a world that does not come about."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(ranks: int) -> int:
    """Ranks of this machine; the code of the first that fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    place["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "isograd", *sys.argv[1:]]
    running = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    return next((code for code in [one.wait() for one in running] if code), 0)
