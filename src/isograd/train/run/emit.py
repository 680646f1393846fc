"""Scripts that start a run elsewhere: torchrun on several machines, Slurm, Kubernetes, Kubeflow, SkyPilot.

The layout decides how many ranks there are, and `Cluster` how they are spread over machines. torchrun turns its ranks'
exit codes into 1; a Kubernetes Job or a PyTorchJob starts a pod again until it succeeds, and the run resumes. With
`resilience.after_death: replace` torchrun and the Slurm script start all ranks again where they are, after a death;
where that does not help, a JobSet makes its pods again, and SkyPilot its machines.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePosixPath
from textwrap import indent

from isograd.core.layout import Layout
from isograd.errors import ConfigError
from isograd.train.config import Config

USUAL = (8, 4)  # GPUs of a machine where nothing is said: the most that divide the ranks
VOLUME = "/runs"  # where the pods' shared volume is mounted

SLURM = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --gpus-per-node={per_node}
#SBATCH --cpus-per-task={cpus}
#SBATCH --time={time}
{partition}#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
# Submit from the folder that the config's paths are relative to. All nodes must see that folder and {run}
set -u
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS={cpus}
for start in $(seq 0 {restarts}); do
  code=0
  # --wait: ranks that stop together may end a moment apart, and those that do not notice a death are ended
  srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait=60 {command} || code=$?
  case "$code" in 0 | 2 | 6 | 75) break ;; esac # done, a mistake, not finite, asked to stop: no death
done
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

TORCHRUN = """#!/bin/bash
# Run this on each of {nodes} machine(s), with NODE_RANK from 0 and MASTER_ADDR the name of the first machine
set -eu
export OMP_NUM_THREADS={cpus}
exec torchrun --nnodes={nodes} --nproc-per-node={per_node} --node-rank="${{NODE_RANK:-0}}" \\
  --master-addr="${{MASTER_ADDR:-127.0.0.1}}" --master-port="${{MASTER_PORT:-29500}}" \\
  --max-restarts={restarts} --no-python -- {command}
"""

WORDS = """exec torchrun --nnodes={nodes} --nproc-per-node={per_node} --node-rank={rank}
--master-addr={first} --master-port=29500
--max-restarts={restarts} --no-python --
{command}
"""

POD = """terminationGracePeriodSeconds: 300 # time to finish a step and save it
volumes:
  - name: runs # one that all pods can write: every rank writes its part of a checkpoint
    persistentVolumeClaim: {{claimName: {claim}}}
  - name: shm # NCCL's shared memory; a pod's own /dev/shm is 64 MiB
    emptyDir: {{medium: Memory, sizeLimit: {shm}Gi}}
containers:
  - name: pytorch # as Kubeflow's operator wants it
    image: {image} # has isograd, the config and its data
    volumeMounts:
      - {{name: runs, mountPath: {volume}}}
      - {{name: shm, mountPath: /dev/shm}}
    resources:
      requests: {{cpu: {pod_cpus}}}
      limits: {{nvidia.com/gpu: {per_node}}}
    env: [{{name: OMP_NUM_THREADS, value: "{cpus}"}}]
    command: [bash, -c]
    args:
      - >-
""" + indent(WORDS, " " * 8)

JOB = """completions: {nodes}
parallelism: {nodes}
completionMode: Indexed
activeDeadlineSeconds: {seconds}
template:
  spec:
    restartPolicy: Never
    subdomain: {name}
""" + indent(POD, " " * 4)

K8S = """apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None # gives each pod a name: {first}
  publishNotReadyAddresses: true # ranks look for each other before pods count as ready
  selector: {{job-name: {name}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  backoffLimit: 100 # a pod that ends before the run is done is started again, and resumes
""" + indent(JOB, " " * 2)

JOBSET = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: {name}}}
spec:
  network: {{enableDNSHostnames: true, publishNotReadyAddresses: true}} # gives each pod a name: {first}
  failurePolicy: {{maxRestarts: {restarts}}} # how often all pods are made again, and the run resumes
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          backoffLimit: 0 # a pod that fails ends all of them
""" + indent(JOB, " " * 10)

PYTORCHJOB = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: {name}}}
spec:
  nprocPerNode: "{per_node}" # with it the operator sets the variables PET_...
  runPolicy: {{backoffLimit: 100, activeDeadlineSeconds: {seconds}, cleanPodPolicy: Running}}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure # a pod that ends before the run is done is started again, and resumes
      template: &pod
        spec:
""" + indent(POD, " " * 10)

WORKERS = "    Worker: {{replicas: {}, restartPolicy: OnFailure, template: *pod}}"

SKYPILOT = """name: {name}
num_nodes: {nodes}
workdir: . # launch from the folder that the config's paths are relative to
resources:
  accelerators: "{gpu}:{per_node}"
  cpus: {pod_cpus}+
  image_id: "docker:{image}" # has isograd
  job_recovery: {{max_restarts_on_errors: {restarts}}} # of a managed job (sky jobs launch)
volumes: {{{volume}: {claim}}} # one that all nodes can write: every rank writes its part of a checkpoint
envs: {{OMP_NUM_THREADS: "{cpus}"}}
setup: isograd --version
run: >-
""" + indent(WORDS.replace("{per_node}", "$SKYPILOT_NUM_GPUS_PER_NODE"), " " * 2)

KINDS = {  # the script; where torchrun's words are in YAML: the number of a machine, and the name of the first
    "torchrun": (TORCHRUN, "", ""),
    "slurm": (SLURM, "", ""),
    "k8s": (K8S, "$JOB_COMPLETION_INDEX", "{name}-0.{name}"),
    "jobset": (JOBSET, "$JOB_COMPLETION_INDEX", "{name}-node-0-0.{name}"),
    "pytorchjob": (PYTORCHJOB + "{workers}", "$PET_NODE_RANK", "$PET_MASTER_ADDR"),
    "skypilot": (SKYPILOT, "$SKYPILOT_NODE_RANK", '$(head -n 1 <<< "$SKYPILOT_NODE_IPS")'),
}


@dataclass(frozen=True)
class Cluster:
    """How a run is spread over machines, as the command line says it. None: computed or left to the scheduler."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus: int = 8  # of each rank
    time: str = "24:00:00"  # hours:minutes:seconds, or days-hours:minutes:seconds
    partition: str | None = None
    image: str = "REPLACE-WITH-YOUR-IMAGE"
    claim: str = "REPLACE-WITH-YOUR-CLAIM"


def script(kind: str, path: str, dotted: list[str], config: Config, cluster: Cluster) -> str:
    """The text of a script of one of `KINDS`."""
    nodes, per_node = spread(config, cluster)
    name = name_of(config)
    text, rank, first = KINDS[kind]
    run, after = config.run, config.resilience
    # 'steps=3' as '--steps=3', as no file on a cluster is named.
    set_here = {n: [f"--{word.removeprefix('--')}", *value] for n, (word, *value) in words_of_fields(dotted).items()}
    if rank:
        run = str(PurePosixPath(VOLUME) / name)
        set_here["run"] = [f"--run={run}"]
    command = shlex.join(["isograd", "train", path, *chain(*set_here.values())])
    if not (command + run).isprintable():
        raise ConfigError(
            "IG638", "a line break or a control character in the command cannot go into a script", seen=repr(command),
            expected="options of one line", fix="put such values into the config file",
        )  # fmt: skip
    if kind in ("k8s", "jobset", "pytorchjob"):
        command = command.replace("$", "$$")  # in `args` Kubernetes reads $(NAME) and $$ before a shell does
    return text.format(
        name=name, nodes=nodes, per_node=per_node, run=run, cpus=cluster.cpus, pod_cpus=cluster.cpus * per_node,
        restarts=after.tries if after.after_death == "replace" else 0,
        time=cluster.time, seconds=_seconds(cluster.time), volume=VOLUME, shm=8 * per_node,
        partition=f"#SBATCH --partition={_word('--partition', cluster.partition)}\n" if cluster.partition else "",
        rank=rank, first=first.format(name=name), workers=WORKERS.format(nodes - 1) if nodes > 1 else "",
        gpu=_word("--partition", cluster.partition or "REPLACE-WITH-YOUR-GPU"),
        image=_word("--image", cluster.image), claim=_word("--claim", cluster.claim),
        command=command,
    ).rstrip()  # fmt: skip


def spread(config: Config, cluster: Cluster) -> tuple[int, int]:
    """(machines, ranks on each): given, or computed from the GPUs of a machine."""
    ranks = Layout.parse(config.layout).world_size
    nodes, per_node = cluster.nodes, cluster.gpus_per_node
    if nodes is None and per_node is None:
        per_node = ranks if ranks <= max(USUAL) else next((n for n in USUAL if ranks % n == 0), 0)
        if not per_node:
            raise ConfigError(
                "IG638", f"{ranks} ranks of layout {config.layout!r} fill no whole number of machines of 8 or 4 GPUs",
                expected="how they are spread over machines", fix="--gpus-per-node N, or --nodes N",
            )  # fmt: skip
    if nodes is None:
        assert per_node is not None
        nodes = -(-ranks // max(1, per_node))
    if nodes < 1 or ranks % nodes or (per_node is not None and (per_node < 1 or nodes * per_node < ranks)):
        here = f"{nodes} machine(s)" + (f" of {per_node} GPUs" if per_node is not None else "")
        raise ConfigError(
            "IG638", f"{ranks} ranks of layout {config.layout!r} do not spread evenly over {here}",
            expected="a number of machines that divides the ranks, with a GPU for each rank",
            fix="another --nodes or --gpus-per-node, or another --layout",
        )  # fmt: skip
    if per_node is None and ranks // nodes > max(USUAL):
        raise ConfigError(
            "IG638", f"{ranks} ranks of {config.layout!r} on {nodes} machine(s) are {ranks // nodes} GPUs on each",
            expected=f"as many GPUs as a machine has; more than {max(USUAL)} have to be said",
            fix=f"--gpus-per-node {max(USUAL)} (with --nodes {-(-ranks // max(USUAL))}), or --gpus-per-node N for what "
            "the machines have",
        )  # fmt: skip
    return nodes, ranks // nodes


def name_of(config: Config) -> str:
    """The run's folder as a name that Slurm and Kubernetes accept: at most 45 of a-z, 0-9 and '-', a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", config.folder.name.lower()).strip("-")[:45].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def words_of_fields(words: list[str]) -> dict[str, list[str]]:
    """Which fields these words of the command line set; each with its words."""
    rest, found = list(words), dict[str, list[str]]()
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        found[name] = [word] if equals or not rest else [word, rest.pop(0)]
    return found


def _seconds(time: str) -> int:
    match = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)", time)
    if match is None:
        raise ConfigError(
            "IG638", f"--time {time!r} is not a time", expected="hours:minutes:seconds or days-hours:minutes:seconds",
            fix="for example --time 24:00:00",
        )  # fmt: skip
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _word(option: str, text: str | None) -> str:
    """A name that goes into a script as it is."""
    if text is None or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@,-]*", text):
        raise ConfigError("IG638", f"{option} {text!r} is not a name", expected="letters, digits and . _ / : @ , -")
    return text
