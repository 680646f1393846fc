"""A network that is really cut: two machines imitated by network namespaces, and the cable between them taken down."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isograd.train.stall import STALLED

RUN = """version: 1
run: {folder}/run
layout: dp2 zero1
model: {{preset: tiny-llama, options: {{vocab: 257}}}}
data: {{sources: [{{path: {text}}}], length: 12}}
optimizer: {{lr: 1e-2}}
steps: 200000
batch: 4
safety: {{stall_s: 6.0}}
log: {{sample: 0}}
"""
NAMESPACES = """
mount -t tmpfs tmpfs /run && ip netns add a && ip netns add b && ip link add va type veth peer name vb || exit 99
ip link set va netns a && ip link set vb netns b
ip -n a addr add 10.9.0.1/24 dev va && ip -n b addr add 10.9.0.2/24 dev vb
for n in a b; do ip -n $n link set lo up; ip -n $n link set v$n up; done
export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.9.0.1 MASTER_PORT=29611 OMP_NUM_THREADS=1
for n in a b; do
  RANK=$([ $n = a ] && echo 0 || echo 1) GLOO_SOCKET_IFNAME=v$n ip netns exec $n unshare -u \\
    sh -c "hostname host-$n; exec $PYTHON -m isograd train run.yaml" > $n.txt 2>&1 &
  pids="$pids $!"
done
for i in $(seq 400); do [ $(grep -c '^step' a.txt) -ge 3 ] && break; sleep 0.2; done
ip -n a link set va down
for p in $pids; do wait $p; echo ended with $?; done
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="network namespaces are made by unshare")
def test_a_cut_network_is_named_with_both_ranks_and_machines(tmp_path: Path, text: Path) -> None:
    """FAILURES B9: of a network that was cut for good, the ranks said that they waited for different things."""
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path, text=text))
    script = NAMESPACES.replace("$PYTHON", sys.executable)
    done = subprocess.run(
        ["unshare", "-Urnm", "bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"this machine allows no network namespaces: {done.stderr[:200]}")
    assert done.stdout.split("\n")[:2] == [f"ended with {STALLED}"] * 2
    said = (tmp_path / "a.txt").read_text() + (tmp_path / "b.txt").read_text()
    assert re.search(r"IG980: no progress for 6 s while in step \d+, (optimizer|forward and backward)\n", said)
    assert "connection lost between rank 0 on host-a and rank 1 on host-b" in said
    assert "check the network between host-a, host-b" in said
