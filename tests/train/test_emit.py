"""Scripts for schedulers that would run: their structure is checked against what each of them accepts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from isograd.cli.main import main
from isograd.cli.train import EMITTED
from isograd.train.run import emit

RUN = """version: 1
run: {run}
layout: {layout}
model: {{preset: tiny-llama}}
data: {{sources: [{{path: data}}], length: 8}}
optimizer: {{lr: 1e-3}}
steps: 2
batch: 64
"""


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(kind: str, *words: str, layout: str = "dp16 tp4 sp zero1", run: str = "runs/My Run_1") -> str:
    Path("run.yaml").write_text(RUN.format(layout=layout, run=run))
    command = ["python", "-m", "isograd", "train", "run.yaml", "--emit", kind, *words]
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as said:
        assert main(command[3:]) == 0
    return said.getvalue()


def bash(text: str, tools: dict[str, str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with stand-ins for the cluster's commands; each is a line of shell."""
    folder = Path("tools")
    folder.mkdir(exist_ok=True)
    for name, line in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    path = f"{folder.absolute()}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash"], input=text, capture_output=True, text=True, env={"PATH": path, **env}, check=False, timeout=60
    )


# -- Slurm

DIRECTIVES = {
    "job-name": r"[a-z][a-z0-9-]*", "nodes": r"[1-9]\d*", "ntasks-per-node": r"[1-9]\d*", "gpus-per-node": r"[1-9]\d*",
    "cpus-per-task": r"[1-9]\d*", "time": r"(\d+-)?\d+:\d\d:\d\d", "partition": r"[\w.-]+", "signal": r"USR1@\d+",
    "requeue": "", "open-mode": "append", "output": r"[\w.-]+-%j\.log",
}  # fmt: skip


def directives(text: str) -> dict[str, str]:
    """What sbatch reads: #SBATCH lines before the first command; each known, in its form, once."""
    found: dict[str, str] = {}
    head = text.partition("\nset -u")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    for line in head[1:]:
        if line.startswith("#SBATCH"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            assert re.fullmatch(DIRECTIVES[name], value), line
            assert name not in found
            found[name] = value
        else:
            assert line.startswith("#"), line
    assert "#SBATCH" not in text.partition("\nset -u")[2]
    return found


def test_slurm_gets_machines_time_partition_and_cores() -> None:
    """FAILURES B16: without --nodes the script asked for one node of 64 GPUs."""
    text = script("slurm", "--partition", "gpu.long", "--time", "2-00:00:00", "--cpus", "12")
    found = directives(text)
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("8", "8", "8")
    assert (found["partition"], found["time"], found["cpus-per-task"]) == ("gpu.long", "2-00:00:00", "12")
    assert "partition" not in directives(script("slurm"))
    assert directives(script("slurm", "--gpus-per-node", "4"))["nodes"] == "16"
    assert directives(script("slurm", "--nodes", "2", "--gpus-per-node", "32"))["gpus-per-node"] == "32"
    assert directives(script("slurm", layout="dp2"))["nodes"] == "1"
    assert directives(script("slurm", layout="dp4 tp3"))["nodes"] == "3"  # of 4 GPUs: 8 do not divide 12


@pytest.mark.parametrize("kind", emit.KINDS)
def test_machines_of_more_gpus_than_is_usual_are_asked_for(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """FAILURES E17: --nodes 8 gave a script for 64 GPUs a node."""
    Path("run.yaml").write_text(RUN.format(layout="dp128 tp4 zero1", run="runs/one").replace("64", "512"))
    assert main(["train", "run.yaml", "--emit", kind, "--nodes", "8"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("IG638") and not said.out
    assert "64 GPUs on each" in said.err and "--gpus-per-node 8 (with --nodes 64)" in said.err
    assert main(["train", "run.yaml", "--emit", kind, "--nodes", "8", "--gpus-per-node", "64"]) == 0


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (1, False)])
def test_a_slurm_job_that_was_stopped_is_queued_again_and_keeps_its_code(code: int, requeued: bool) -> None:
    tools = {
        "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "scontrol $*"; fi',
        "srun": f'echo "$MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS"; echo "$*"; exit {code}',
    }
    text = script("slurm", "--optimizer.lr", "1e-3")
    done = bash(text, tools, SLURM_JOB_ID="41234", SLURM_JOB_NODELIST="node[7-8]")
    assert done.returncode == code, done.stderr
    first, command, *rest = done.stdout.splitlines()
    assert first == "node7 21234 8"
    assert command.endswith("--kill-on-bad-exit=0 --wait=60 isograd train run.yaml --optimizer.lr 1e-3")
    assert ("scontrol requeue 41234" in rest) == requeued


@pytest.mark.parametrize(("codes", "starts", "ends"), [("137 7 0", 3, 0), ("1 1 1 1 1", 3, 1), ("137 2 0", 2, 2)])
def test_a_slurm_job_starts_its_ranks_again_after_a_death_but_not_after_a_mistake(
    codes: str, starts: int, ends: int
) -> None:
    tools = {
        "scontrol": "echo node7",
        "srun": f'echo srun; echo >> starts; set -- {codes}; shift $(($(wc -l < starts) - 1)); exit "$1"',
    }
    text = script("slurm", "--resilience.after_death", "replace", "--resilience.tries", "2")
    done = bash(text, tools, SLURM_JOB_ID="41234", SLURM_JOB_NODELIST="node7")
    assert (done.stdout.splitlines(), done.returncode) == (["srun"] * starts, ends), done.stderr
    for kind in set(emit.KINDS) - {"slurm"}:
        assert "--max-restarts=3 " in script(kind, "--resilience.after_death", "replace")


# -- torchrun


def test_torchrun_is_given_machines_and_the_same_command() -> None:
    text = script("torchrun", "--nodes", "16", "--run", "out")
    done = bash(text, {"torchrun": 'printf "%s\\n" "$@"'}, NODE_RANK="3", MASTER_ADDR="first")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "--nnodes=16", "--nproc-per-node=4", "--node-rank=3", "--master-addr=first", "--master-port=29500",
        "--max-restarts=0", "--no-python", "--", "isograd", "train", "run.yaml", "--run", "out",
    ]  # fmt: skip


def test_a_field_that_is_set_by_an_equals_sign_alone_is_an_option_in_the_script() -> None:
    assert script("torchrun", "optimizer.lr=1e-3", "--steps", "3", "run=out").rstrip().endswith(
        "isograd train run.yaml --optimizer.lr=1e-3 --steps 3 --run=out"
    )  # fmt: skip
    assert "run=out" not in script("k8s", "optimizer.lr=1e-3", "run=out", "--image", "i", "--claim", "c")


# -- Kubernetes: the parts of batch/v1 Job and v1 Service that are used, as its API defines them


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Name = Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")  # RFC 1035, which a Service's name must be
Quantity = Field(pattern=r"^\d+(Gi|Mi|m)?$")


class Meta(Strict):
    name: str = Name


class Variable(Strict):
    name: str
    value: str  # Kubernetes refuses a number here


class Resources(Strict):
    requests: dict[Literal["cpu"], int]
    limits: dict[Literal["nvidia.com/gpu"], int]


class Mount(Strict):
    name: str = Name
    mountPath: str = Field(pattern="^/[^:]+$")


class Container(Strict):
    name: str = Name
    image: str
    command: list[str]
    args: list[str]
    env: list[Variable]
    resources: Resources
    volumeMounts: list[Mount]


class Claim(Strict):
    claimName: str


class EmptyDir(Strict):
    medium: Literal["Memory"]
    sizeLimit: str = Quantity


class Volume(Strict):
    name: str = Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDir | None = None


class Pod(Strict):
    terminationGracePeriodSeconds: int
    containers: list[Container]
    volumes: list[Volume]


class JobPod(Pod):
    restartPolicy: Literal["Never", "OnFailure"]  # a Job allows no other
    subdomain: str = Name


class Template(Strict):
    spec: JobPod


class JobSpec(Strict):
    completions: int = Field(ge=1)
    parallelism: int = Field(ge=1)
    completionMode: Literal["Indexed"]
    backoffLimit: int
    activeDeadlineSeconds: int = Field(ge=1)
    template: Template


class Job(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Meta
    spec: JobSpec


class ServiceSpec(Strict):
    clusterIP: Literal["None"]
    publishNotReadyAddresses: bool
    selector: dict[str, str]


class Service(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["Service"]
    metadata: Meta
    spec: ServiceSpec


def the_container(pod: Pod) -> Container:
    """Of the test's image, with 8 GPUs, the claim at /runs and memory of its own at /dev/shm."""
    (container,) = pod.containers
    assert container.image == "registry/train:1"
    assert container.resources.limits == {"nvidia.com/gpu": 8}
    volumes = {volume.name: volume for volume in pod.volumes}
    mounts = {mount.mountPath: volumes[mount.name] for mount in container.volumeMounts}
    assert mounts["/dev/shm"].emptyDir is not None
    claim = mounts["/runs"].persistentVolumeClaim
    assert claim is not None
    assert claim.claimName == "team-data"
    return container


def test_kubernetes_gets_a_job_whose_run_is_on_the_volume_and_whose_ranks_share_memory() -> None:
    """FAILURES B16: the run folder was not on the volume, and /dev/shm was the pod's 64 MiB."""
    words = ["--claim", "team-data", "--image", "registry/train:1", "--time", "10:00:00", "--run", "runs/My Run_1"]
    service, job = list(yaml.safe_load_all(script("k8s", *words)))
    service, job = Service.model_validate(service), Job.model_validate(job)
    assert (job.spec.completions, job.spec.parallelism, job.spec.activeDeadlineSeconds) == (8, 8, 36_000)
    pod = job.spec.template.spec
    container = the_container(pod)
    assert container.args[0].endswith("isograd train run.yaml --run=/runs/my-run-1")  # given once, on the volume
    # the name that ranks look for is one the service gives: pod NAME-0 in subdomain NAME
    assert f"--master-addr={job.metadata.name}-0.{service.metadata.name} " in container.args[0]
    assert pod.subdomain == service.metadata.name
    assert service.spec.selector == {"job-name": job.metadata.name}


# -- JobSet (jobset.x-k8s.io/v1alpha2), Kubeflow's PyTorchJob (kubeflow.org/v1), a task of SkyPilot


class Network(Strict):
    enableDNSHostnames: bool
    publishNotReadyAddresses: bool


class FailurePolicy(Strict):
    maxRestarts: int = Field(ge=0)


class JobTemplate(Strict):
    spec: JobSpec


class ReplicatedJob(Strict):
    name: str = Name
    replicas: int = Field(ge=1)
    template: JobTemplate


class JobSetSpec(Strict):
    network: Network
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob]


class JobSet(Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Meta
    spec: JobSetSpec


class ReplicaTemplate(Strict):
    spec: Pod  # without a restart policy, which is the replica's


class Replica(Strict):
    replicas: int = Field(ge=1)
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: ReplicaTemplate


class RunPolicy(Strict):
    backoffLimit: int
    activeDeadlineSeconds: int = Field(ge=1)
    cleanPodPolicy: Literal["All", "Running", "None"]


class PyTorchJobSpec(Strict):
    nprocPerNode: str = Field(pattern=r"^([1-9]\d*|auto|cpu|gpu)$")  # a string, says its definition
    runPolicy: RunPolicy
    pytorchReplicaSpecs: dict[Literal["Master", "Worker"], Replica]


class PyTorchJob(Strict):
    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Meta
    spec: PyTorchJobSpec


class JobRecovery(Strict):
    max_restarts_on_errors: int = Field(ge=0)


class SkyResources(Strict):
    accelerators: str = Field(pattern=r"^[A-Za-z0-9-]+:[1-9]\d*$")
    cpus: str = Field(pattern=r"^[1-9]\d*\+?$")
    image_id: str = Field(pattern="^docker:.")
    job_recovery: JobRecovery


class SkyTask(Strict):
    name: str = Name
    num_nodes: int = Field(ge=1)
    workdir: str
    resources: SkyResources
    volumes: dict[str, str]
    envs: dict[str, str]
    setup: str
    run: str


WORDS = ["--claim", "team-data", "--image", "registry/train:1", "--time", "10:00:00", "--partition", "H100"]


def test_a_jobset_has_one_job_of_all_machines_which_is_made_again_as_a_whole() -> None:
    jobset = JobSet.model_validate(yaml.safe_load(script("jobset", *WORDS)))
    (replicated,) = jobset.spec.replicatedJobs
    job = replicated.template.spec
    assert (replicated.replicas, job.completions, job.parallelism, job.backoffLimit) == (1, 8, 8, 0)
    assert job.activeDeadlineSeconds == 36_000
    container = the_container(job.template.spec)
    assert jobset.spec.network.enableDNSHostnames
    assert f"--master-addr={jobset.metadata.name}-{replicated.name}-0-0.{jobset.metadata.name} " in container.args[0]
    assert job.template.spec.subdomain == jobset.metadata.name
    assert jobset.spec.failurePolicy.maxRestarts == 0
    again = yaml.safe_load(script("jobset", "--resilience.after_death", "replace", "--resilience.tries", "5"))
    assert JobSet.model_validate(again).spec.failurePolicy.maxRestarts == 5


def test_names_of_pods_fit_into_a_label_of_dns() -> None:
    """JobSet refuses longer ones: JOBSET-JOB-0-INDEX, and a suffix of six."""
    jobset = JobSet.model_validate(yaml.safe_load(script("jobset", "--nodes", "64", run="x" * 90)))
    (replicated,) = jobset.spec.replicatedJobs
    assert len(f"{jobset.metadata.name}-{replicated.name}-0-9999-abcde") == 63
    job = PyTorchJob.model_validate(yaml.safe_load(script("pytorchjob", "--nodes", "64", run="x" * 90)))
    assert len(f"{job.metadata.name}-worker-9999") <= 63


@pytest.mark.parametrize(("nodes", "replicas"), [(1, {"Master": 1}), (2, {"Master": 1, "Worker": 1})])
def test_a_pytorchjob_has_a_master_and_workers_of_one_pod_spec(nodes: int, replicas: dict[str, int]) -> None:
    text = script("pytorchjob", *WORDS, layout=f"dp{8 * nodes}")
    job = PyTorchJob.model_validate(yaml.safe_load(text))
    found = job.spec.pytorchReplicaSpecs
    assert {str(name): replica.replicas for name, replica in found.items()} == replicas
    assert job.spec.nprocPerNode == "8"
    assert job.spec.runPolicy.activeDeadlineSeconds == 36_000
    for replica in found.values():
        assert replica.restartPolicy == "OnFailure"
        assert the_container(replica.template.spec).name == "pytorch"  # the operator looks for this name
        assert replica.template == found["Master"].template


def test_a_task_of_skypilot_asks_for_machines_and_its_managed_job_for_restarts() -> None:
    task = SkyTask.model_validate(yaml.safe_load(script("skypilot", *WORDS)))
    assert (task.num_nodes, task.resources.accelerators, task.resources.cpus) == (8, "H100:8", "64+")
    assert (task.resources.image_id, task.volumes) == ("docker:registry/train:1", {"/runs": "team-data"})
    assert task.resources.job_recovery.max_restarts_on_errors == 0
    assert task.envs == {"OMP_NUM_THREADS": "8"}
    done = bash(task.setup, {"isograd": 'echo "isograd $*"'})
    assert (done.returncode, done.stdout) == (0, "isograd --version\n"), done.stderr
    again = yaml.safe_load(script("skypilot", "--resilience.after_death", "replace", "--resilience.tries", "5"))
    assert SkyTask.model_validate(again).resources.job_recovery.max_restarts_on_errors == 5


def machine(kind: str, text: str, rank: int) -> tuple[str, dict[str, str], str]:
    """What a machine runs, the variables that its cluster sets there, and the name of the first machine."""
    found = list(yaml.safe_load_all(text))[-1]
    if kind == "k8s":
        job = Job.model_validate(found)
        first = f"{job.metadata.name}-0.{job.spec.template.spec.subdomain}"
        return job.spec.template.spec.containers[0].args[0], {"JOB_COMPLETION_INDEX": str(rank)}, first
    if kind == "jobset":
        jobset = JobSet.model_validate(found)
        (replicated,) = jobset.spec.replicatedJobs
        args = replicated.template.spec.template.spec.containers[0].args
        first = f"{jobset.metadata.name}-{replicated.name}-0-0.{jobset.metadata.name}"
        return args[0], {"JOB_COMPLETION_INDEX": str(rank)}, first
    if kind == "pytorchjob":
        pytorch = PyTorchJob.model_validate(found)
        replicas, first = pytorch.spec.pytorchReplicaSpecs, f"{pytorch.metadata.name}-master-0"
        pet = {
            "PET_NNODES": str(sum(each.replicas for each in replicas.values())), "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": pytorch.spec.nprocPerNode, "PET_MASTER_ADDR": first, "PET_MASTER_PORT": "23456",
        }  # fmt: skip
        return replicas["Worker" if rank else "Master"].template.spec.containers[0].args[0], pet, first
    task = SkyTask.model_validate(found)
    addresses = [f"10.0.0.{7 + each}" for each in range(task.num_nodes)]
    sky = {
        "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(addresses),
        "SKYPILOT_NUM_GPUS_PER_NODE": task.resources.accelerators.partition(":")[2], **task.envs,
    }  # fmt: skip
    return task.run, sky, addresses[0]


@pytest.mark.parametrize("kind", ["k8s", "jobset", "pytorchjob", "skypilot"])
def test_a_path_reaches_isograd_as_it_is_past_kubernetes_and_the_shell(kind: str) -> None:
    path = "data/it's $(OMP_NUM_THREADS) $(date) $$.bin"
    command, variables, _ = machine(kind, script(kind, "--data.sources", json.dumps([{"path": path}]), layout="dp4"), 0)
    if kind != "skypilot":  # Kubernetes: $$ is $, and $(NAME) the variable of `env`, where there is one
        known = {"$$": "$", "$(OMP_NUM_THREADS)": "8"}
        command = re.sub(r"\$\$|\$\(\w+\)", lambda found: known.get(found[0], found[0]), command)
    done = bash(command, {"torchrun": 'printf "%s\\n" "$@"'}, **variables)
    assert path in done.stdout, done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["k8s", "jobset", "pytorchjob", "skypilot"])
def test_each_machine_calls_torchrun_with_its_number_and_the_first_machine(
    kind: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import parse_args

    text = script(kind, "--nodes", str(nodes), "--optimizer.lr", "1e-3", layout=f"dp{4 * nodes}")
    for rank in range(nodes):
        command, variables, first = machine(kind, text, rank)
        done = bash(command, {"torchrun": 'printf "%s\\n" "$@"'}, **variables)
        assert done.returncode == 0, done.stderr
        with monkeypatch.context() as patch:  # torchrun reads PET_... itself, where a word is not given
            for name, value in variables.items():
                patch.setenv(name, value)
            words = parse_args(done.stdout.splitlines())
        assert (words.nnodes, words.nproc_per_node, words.node_rank) == (str(nodes), "4", rank)
        assert (words.master_addr, words.master_port, words.max_restarts) == (first, 29500, 0)
        assert words.no_python
        assert [words.training_script, *words.training_script_args] == [
            "isograd", "train", "run.yaml", "--optimizer.lr", "1e-3", "--run=/runs/my-run-1",
        ]  # fmt: skip


def test_the_command_line_offers_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(emit.KINDS) == EMITTED
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "{" + ",".join(EMITTED) + "}" in capsys.readouterr().out


# -- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "3"], "64 ranks of layout 'dp16 tp4 sp zero1' do not spread evenly over 3 machine(s)"),
        (["--nodes", "0"], "IG638"),
        (["--nodes", "4", "--gpus-per-node", "8"], "4 machine(s) of 8 GPUs"),
        (["--gpus-per-node", "7"], "IG638"),
        (["--time", "tomorrow"], "--time 'tomorrow' is not a time"),
        (["--time", "1:99:00"], "--time '1:99:00' is not a time"),
        (["--cpus", "0"], "'0' is not a whole number from 1"),
        (["--partition", "a b"], "--partition 'a b' is not a name"),
        (["--run", "a\n#SBATCH --uid=0"], "line break"),
        (["--layout", "dp2 tp11", "--model.options.heads", "22"], "fill no whole number of machines"),
    ],
)
def test_what_no_cluster_could_run_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN.format(layout="dp16 tp4 sp zero1", run="x"))
    assert main(["train", "run.yaml", "--emit", "slurm", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "name"),
    [("runs/A_b.c", "a-b-c"), ("runs/8b", "run-8b"), ("x/" + "é" * 9, "run"), ("x" * 90, "x" * 45)],
)
def test_a_folder_becomes_a_name_that_clusters_accept(folder: str, name: str) -> None:
    from isograd.train import reading

    Path("run.yaml").write_text(RUN.format(layout="dp1", run=folder))
    found = emit.name_of(reading.load("run.yaml").config)
    assert found == name
    Meta.model_validate({"name": found})
