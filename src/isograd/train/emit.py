"""Scripts that start a run elsewhere: torchrun on this machine's peers, a Slurm batch job, a Kubernetes Job.

They run the same `isograd train` with the same config: the layout decides how many ranks there are. A clean stop is
asked for two minutes before a Slurm limit, and exit code 75 queues the job again. torchrun hides its ranks' exit codes.
"""

from __future__ import annotations

import shlex

from isograd.errors import ConfigError
from isograd.layout import Layout
from isograd.train.config import Config

SLURM = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --gpus-per-node={per_node}
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={run}/slurm-%j.log
# submit from the folder that the config's paths are relative to; {run} must exist and be seen by all nodes
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS={threads}
srun --kill-on-bad-exit=0 --wait=60 {command} # ranks that stop together may end a moment apart
code=$?
if [ $code -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""

TORCHRUN = """#!/bin/bash
# on each of {nodes} machine(s), with NODE_RANK from 0 and MASTER_ADDR the first machine's name
export OMP_NUM_THREADS={threads}
exec torchrun --nnodes={nodes} --nproc-per-node={per_node} --node-rank="${{NODE_RANK:-0}}" \\
  --master-addr="${{MASTER_ADDR:-127.0.0.1}}" --master-port="${{MASTER_PORT:-29500}}" \\
  --no-python -- {command}
"""

K8S = """apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  backoffLimit: 100 # a pod that ends before the run is done is started again, and goes on
  template:
    spec:
      restartPolicy: Never
      subdomain: {name}
      terminationGracePeriodSeconds: 300
      containers:
        - name: train
          image: REPLACE-WITH-YOUR-IMAGE # has isograd, the config and its data
          command: [bash, -c]
          args:
            - >-
              exec torchrun --nnodes={nodes} --nproc-per-node={per_node} --node-rank=$JOB_COMPLETION_INDEX
              --master-addr={name}-0.{name} --master-port=29500 --no-python --
              {command}
          resources: {{limits: {{nvidia.com/gpu: {per_node}}}}}
          volumeMounts: [{{name: run, mountPath: /runs}}]
      volumes:
        - name: run # one that all pods share: checkpoints are written by every rank
          persistentVolumeClaim: {{claimName: REPLACE-WITH-YOUR-CLAIM}}
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  selector: {{job-name: {name}}}
"""


def script(kind: str, path: str, dotted: list[str], config: Config, nodes: int) -> str:
    ranks = Layout.parse(config.layout).world_size
    if nodes < 1 or ranks % nodes:
        raise ConfigError(
            "IG638", f"{ranks} ranks of layout {config.layout!r} do not spread over {nodes} machines",
            expected="a number of machines that divides the ranks", fix=f"--nodes 1, or another layout for {nodes}",
        )  # fmt: skip
    name = "".join(c if c.isalnum() else "-" for c in config.folder.name.lower()).strip("-") or "isograd"
    text = {"slurm": SLURM, "torchrun": TORCHRUN, "k8s": K8S}[kind]
    command = shlex.join(["isograd", "train", path, *dotted])
    return text.format(
        name=name, nodes=nodes, per_node=ranks // nodes, threads=config.threads, run=config.run, command=command
    ).rstrip()
