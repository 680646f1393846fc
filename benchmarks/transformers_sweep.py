"""Every architecture of transformers with a plan and a causal loss, proven under each layout or refused.

    python -m benchmarks.transformers_sweep                                 # all; writes docs/transformers.md
    python -m benchmarks.transformers_sweep --only llama qwen3 --layouts tp2
    python -m benchmarks.transformers_sweep --table                         # writes the page again from the state file

The proof is the one at the start of `ig.hf.load` (src/isograd/hf/proof.py): a small random model in fp64, two
micro-batches with uneven labels, every gradient compared by name with one device's.

Each result is written to the state file at once, and a second start goes on with what is missing. The two ranks are
started anew after every few architectures, so memory stays bounded. A run that hangs is ended.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from isograd.errors import IsogradError
from isograd.hf.losses import library_of
from isograd.hf.sub_configs import is_text, parts_of
from isograd.launcher.launch import World

LAYOUTS = ("tp2", "tp2 zero1", "tp2 sp", "dp2 zero3", "pp2 1f1b", "dp2 ep2", "cp2 ulysses")
OWN = "transformers' own tp2"  # benchmarks/transformers_own.py
STATE = Path("transformers_sweep.json")
PAGE = Path("docs/transformers.md")
FRESH = 8  # architectures until the ranks are started anew
# What the library's own default config leaves open, so that no model can be built of it.
OPEN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_experts_per_tok": 2}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    "paddleocr_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [16, 24, 24]}}
    },
    "step3p7": {"text_config": {"sliding_window": 512}},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 8},  # the default of 7 cannot be cut over two ranks
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
}
HEAD = """# Which models of transformers train under which layout

Written by `python -m benchmarks.transformers_sweep` with transformers {version}; not by hand. Each architecture with a
causal, masked or sequence-to-sequence loss is made small (random weights, fp64) and trains one step of two
micro-batches with uneven labels, under the layout and on one device. Every gradient is compared by name. Tried are
those with a tensor plan, under `dp2 ep2` those with an expert plan, and under `pp2 1f1b` some that have no plan at all.
Models of images and text are trained on text alone; of those around a text model that is itself in the table, only that
one is tried.

- **proven**: every gradient differs from one device's by less than 1e-9 of its norm. Beside it, the share of the small
  copy's parameters that a tp rank holds: half where everything is cut.
- **refused**: `ig.hf.load` raises the error named, before anything is trained.
- **not run**: the small copy made for the proof does not run, on one device or under the layout, so nothing is known.
  `ig.hf.load` refuses such a model, too (IG469).
- An empty cell has not been tried. The cells are of several commits, named below the reasons.
- **wrong**: gradients differ. `ig.hf.load` refuses the model (IG468).
- **transformers' own tp2** is `from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`, judged in the
  same way by `python -m benchmarks.transformers_own`, for some of them: right, or wrong in the parameters named, with
  the coefficient <found, true> / <true, true> of each. It has two micro-batches of uneven labels.

{summary}

| architecture | {layouts} |
|---|{rules}|
"""


ERRORS = """
## The errors of transformers' own execution

**Summed again by every backward.** A parameter of the style `replicated_with_grad_allreduce` (norms of query and key
heads) has a hook that sums all of `.grad` over tp after each backward, also what earlier backwards have summed. Two
equal micro-batches give 3 where 2 is right. With one micro-batch it is right. The smallest program, which prints 1.5:

```python
# torchrun --nproc-per-node 2 smallest.py
import tempfile, torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, head_dim=16)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
torch.manual_seed(0)
one = Qwen3ForCausalLM(config)
if dist.get_rank() == 0:
    one.save_pretrained(folder[0])
dist.barrier()
two = Qwen3ForCausalLM.from_pretrained(folder[0], distributed_config=DistributedConfig(tp_size=2))
ids = torch.arange(3, 13)[None]
for model in (one, two):
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
found, true = (m.model.layers[0].self_attn.q_norm.weight.grad for m in (two, one))
print(float((found * true).sum() / (true * true).sum()))
```

**Never summed.** Parameters between two cut projections that no entry of the plan names, as those of Apertus'
activation, have a part of their gradient on each rank, with one micro-batch, too. The smallest program is
`python -m benchmarks.transformers_own --micros 1 apertus`: `act_fn.alpha_p` 0.64 and `act_fn.alpha_n` 1.2.
"""


def attempt(kind: str, layout: str) -> dict[str, Any]:
    """One cell, on one rank."""
    import warnings

    import transformers

    from isograd.core.mesh import Mesh
    from isograd.hf.proof import compare

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    config = transformers.CONFIG_MAPPING[kind](**OPEN.get(kind, {}))
    try:
        proof = compare(config, Mesh(layout))
    except IsogradError as error:
        said = f"{error.what}: {error.seen}"
        outcome = "not run" if error.code == "IG469" else "refused"
        return {"outcome": outcome, "code": error.code, "why": re.sub(r"0x\w+", "", said)[:240]}
    wrong = [f"{name} ({found:.0e})" for name, found in proof.wrong.items()]
    if wrong:
        return {"outcome": "wrong", "why": f"{len(wrong)} of {len(proof.errors)}: {', '.join(wrong[:3])}"}
    return {"outcome": "proven", "worst": max(proof.errors.values()), "held": proof.held}


def architectures() -> list[str]:
    """Those with a tensor plan or an expert plan and a class with a loss of tokens, by their model_type.

    Of those around a text model that is an architecture of its own, as LLaVA is around Llama, only that one is there.
    """
    found = []
    for kind, config in configs().items():
        inner = [part for part in parts_of(config).values() if is_text(part)]
        own = plans_of(config) if not inner else set().union(*(plans_of(part) for part in inner if why_no_class(part)))
        if own and not why_no_class(config):
            found.append(kind)
    return found


def configs() -> dict[str, Any]:
    """The default config of each architecture, by its model_type."""
    from transformers import CONFIG_MAPPING

    found = {}
    for kind in sorted(CONFIG_MAPPING):
        try:
            found[kind] = CONFIG_MAPPING[kind](**OPEN.get(kind, {}))
        except Exception:  # the default has to be given a value: such as the configs of its parts
            found[kind] = None
    return {kind: config for kind, config in found.items() if config is not None}


def plans_of(config: Any) -> set[str]:
    """Which plans the layers that tokens pass through have: "tp", "ep"."""
    found = {plan for plan in ("tp", "ep") if getattr(config, f"base_model_{plan}_plan", None)}
    return found.union(*(plans_of(part) for part in parts_of(config).values() if is_text(part)))


def why_no_class(config: Any) -> str:
    """What `ig.hf.load` says of an architecture that has no loss of tokens; "" where it has one."""
    try:
        library_of(config, "")
    except IsogradError as error:
        return f"{error.code}: {error.what}"
    return ""


def revision() -> str:
    """The commit that is checked out."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()


def sweep(kinds: list[str], layouts: list[str], state: Path, patience: float) -> None:
    """Fill the cells that are missing."""
    cells = json.loads(state.read_text()) if state.exists() else {}
    world, since, at = World(2), 0, revision()
    for kind in kinds:
        missing = [layout for layout in layouts if f"{kind} | {layout}" not in cells]
        since += bool(missing)
        if since > FRESH:
            world.close()
            world, since = World(2), 0
        for layout in missing:
            try:
                ranks = world.run(attempt, kind, layout, timeout=patience)
                # A rank that only waited for another one's stage says so; the other has the reason.
                found = next((rank for rank in ranks if rank.get("code") != "IG805"), ranks[0])
            except Exception as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                said = error.what if isinstance(error, IsogradError) else lines[-1]
                found = {"outcome": "not run", "why": f"{type(error).__name__}: {said[:240]}"}
            # A stage that fails has closed its connections; so may a rank that says nothing of its own.
            if found["outcome"] != "proven" and ("pp" in layout or "code" not in found):
                world.close()
                world, since = World(2), 0
            cells[f"{kind} | {layout}"] = found | {"at": at}
            state.write_text(json.dumps(cells, indent=1))
            print(f"{kind:24} {layout:10} {found['outcome']:8} {found.get('why', '')[:150]}", flush=True)
    world.close()


def page(state: Path, layouts: list[str]) -> str:
    """The table, with the reasons below it."""
    import transformers

    cells = json.loads(state.read_text())
    kinds = sorted({name.split(" | ")[0] for name in cells})
    tried = {name.partition(" | ")[2] for name in cells}
    layouts = [layout for layout in [*layouts, OWN] if layout in tried]
    counts = {
        layout: Counter(cells[f"{kind} | {layout}"]["outcome"] for kind in kinds if f"{kind} | {layout}" in cells)
        for layout in layouts
    }
    summary = "\n".join(
        f"- `{layout}`: " + ", ".join(f"{number} {outcome}" for outcome, number in count.most_common())
        for layout, count in counts.items()
    )
    reasons: dict[str, int] = {}
    rows = []
    for kind in kinds:
        row = [f"`{kind}`"]
        for layout in layouts:
            cell = cells.get(f"{kind} | {layout}")
            if cell is None:
                row.append("")
            elif cell["outcome"] == "right":
                row.append("right")
            elif cell["outcome"] == "proven":
                row.append(f"proven, {cell['held']:.0%}" if cell.get("held", 1.0) < 1.0 else "proven")
            else:
                why = cell["why"].replace("|", "\\|").replace("\n", " ")
                text = f"{cell['code']}: {why}" if cell.get("code") else why
                row.append(f"{cell['outcome']} ({reasons.setdefault(text, len(reasons) + 1)})")
        rows.append(f"| {' | '.join(row)} |")
    head = HEAD.format(
        version=transformers.__version__,
        summary=summary,
        layouts=" | ".join(layout if layout == OWN else f"`{layout}`" for layout in layouts),
        rules="|".join("---" for _ in layouts),
    )
    notes = "\n".join(f"{number}. {text}" for text, number in reasons.items())
    rest = "\n".join(f"- `{kind}`: {why}" for kind, why in without_loss(kinds).items())
    body = (
        f"{head}{chr(10).join(rows)}\n\n## Reasons\n\n{notes or 'None.'}\n\n## Revisions\n\n{revisions(cells, layouts)}"
    )
    title = "## With a plan, and without a class that has such a loss"
    return f"{body}\n\n{title}\n\n{rest}\n{ERRORS if OWN in layouts else ''}"


def revisions(cells: dict[str, Any], layouts: list[str]) -> str:
    """Of which commit each cell is: all architectures but those named are of the first one."""
    lines = []
    for layout in layouts:
        found: dict[str, list[str]] = {}
        for name, cell in sorted(cells.items()):
            kind, _, column = name.partition(" | ")
            if column == layout:
                found.setdefault(cell.get("at", "unknown"), []).append(f"`{kind}`")
        most, *others = sorted(found.items(), key=lambda item: -len(item[1]))
        rest = "".join(f"; {at}: {', '.join(kinds)}" for at, kinds in others)
        lines.append(f"- `{layout}`: {most[0]} ({len(most[1])}){rest}")
    return "\n".join(lines)


def without_loss(kinds: list[str]) -> dict[str, str]:
    """{architecture: what `ig.hf.load` says}, of those with a plan that are no part of one in the table."""
    every = configs()
    parts = [type(part) for kind in kinds if kind in every for part in parts_of(every[kind]).values()]
    return {
        kind: why
        for kind, config in every.items()
        if kind not in kinds and type(config) not in parts and plans_of(config) and (why := why_no_class(config))
    }


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=None, help="architectures, by their model_type")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for one cell")
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.table:
        sweep(options.only or architectures(), options.layouts, options.state, options.patience)
    options.page.write_text(page(options.state, options.layouts))


if __name__ == "__main__":
    main()
