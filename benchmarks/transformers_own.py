"""transformers' own execution of its tensor plans: tp2, two micro-batches, every gradient compared with one device's.

    python -m benchmarks.transformers_own                    # prints a row for each architecture
    python -m benchmarks.transformers_own llama qwen3
    python -m benchmarks.transformers_own --state transformers_sweep.json      # adds the column to the sweep's table

The model is the small copy of the proof at start (src/isograd/hf/small_config.py), with the same weights, batches and
limit: fp64, 1e-9 of a gradient's norm. It is written to a folder and loaded with `DistributedConfig(tp_size=2)`; two
micro-batches run forward and backward, and `.grad` is read, gathered where it is a DTensor. `isograd` is used for the
reference and to start two ranks only. "coefficient" is <found, true> / <true, true>: 2 for a gradient summed twice.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

from benchmarks.transformers_sweep import OPEN
from isograd.launcher.launch import World

COLUMN = "transformers' own tp2"
SUBSET = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere2", "granite", "smollm3",
          "starcoder2", "gpt_neox", "glm4", "apertus", "mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss",
          "qwen3_next")  # fmt: skip


def attempt(kind: str, folder: str, micros: int) -> dict[str, Any]:
    """One architecture, on one rank of two."""
    import torch
    import transformers
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    from isograd.core.mesh import Mesh
    from isograd.hf import proof, shard
    from isograd.hf.force_fp64 import ForceFP64
    from isograd.hf.losses import library_of
    from isograd.hf.small_config import small

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    mesh, alone = Mesh("tp2"), Mesh.unbound("1")
    tiny = small(transformers.CONFIG_MAPPING[kind](**OPEN.get(kind, {})), 2)
    tiny._experts_implementation = "eager"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    reference = proof._built(tiny, alone, None)
    if mesh.rank == 0:
        reference.save_pretrained(folder)
    proof.told(None, mesh)  # until the folder is there
    try:
        plan = DistributedConfig(tp_size=2)
        with ForceFP64():  # rotary frequencies, too
            model = library_of(tiny, "")[0].from_pretrained(
                folder, config=tiny, dtype=torch.float64, distributed_config=plan, experts_implementation="eager"
            )
        for one in (model.train(), reference):
            parts = [shard(proof._batch(0, number, tiny.vocab_size), alone) for number in range(micros)]
            total = sum(int(part.weight) for part in parts)
            for part in parts:
                with ForceFP64():
                    loss = one(**part.inputs).loss
                (loss * part.weight / total).backward()
        found = {
            n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()
        }
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"outcome": "not run", "why": f"{type(error).__name__}: {(lines or [''])[0][:160]}"}
    finally:
        torch.set_default_dtype(torch.float32)
    truth = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    floor = proof.FLOOR * float(torch.stack([g.norm() for g in truth.values()]).norm())
    wrong = {}
    for name, true in truth.items():
        mine = found.get(name)
        if mine is None or mine.shape != true.shape:
            wrong[name] = "none" if mine is None else f"shape {tuple(mine.shape)}"
        elif not float((mine - true).norm()) / max(float(true.norm()), floor) <= proof.LIMIT:
            wrong[name] = f"{float((mine * true).sum() / (true * true).sum()):.3g}"
    return {"outcome": "wrong" if wrong else "right", "wrong": wrong, "of": len(truth)}


def column(kinds: list[str], micros: int, patience: float) -> dict[str, dict[str, Any]]:
    """The cells of the column, by architecture."""
    cells: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            world = World(2)
            try:
                ranks = world.run(attempt, kind, folder, micros, timeout=patience)
                cell = next((found for found in ranks if found["outcome"] != "right"), ranks[0])
            except Exception as error:
                cell = {"outcome": "not run", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
            world.close()
        if cell["outcome"] == "wrong":
            names = {re.sub(r"\.\d+\.", ".*.", n).removeprefix("model."): c for n, c in cell["wrong"].items()}
            listed = ", ".join(f"{name} {coefficient}" for name, coefficient in list(names.items())[:5])
            cell["why"] = f"{len(cell['wrong'])} of {cell['of']}: {listed}{' ...' if len(names) > 5 else ''}"
        cells[kind] = cell
        print(f"{kind:16} {cell['outcome']:8} {cell.get('why', '')}", flush=True)
    return cells


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("only", nargs="*", default=SUBSET)
    parser.add_argument("--micros", type=int, default=2)
    parser.add_argument("--state", type=Path, default=None)
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for one architecture")
    options = parser.parse_args()
    cells = column(list(options.only), options.micros, options.patience)
    if options.state is not None:
        known = json.loads(options.state.read_text())
        known |= {f"{kind} | {COLUMN}": cell for kind, cell in cells.items()}
        options.state.write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
