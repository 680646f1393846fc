"""What is installed with isograd, as CycloneDX JSON, and the SHA-256 of files such as its wheel.

    python scripts/sbom.py sbom.json dist/*.whl

The standard library alone: versions come from the metadata of what is installed, from isograd's requirements on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any


def installed(root: str = "isograd") -> dict[str, metadata.Distribution]:
    """{name: distribution} of a package and of all that it needs, by the names in their metadata."""
    found: dict[str, metadata.Distribution] = {}
    left = [root]
    while left:
        name = _plain(left.pop())
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of an extra, or of another system
        left += [match[0] for line in found[name].requires or () if (match := re.match(r"[\w.-]+", line))]
    return dict(sorted(found.items()))


def bill(files: list[Path]) -> dict[str, Any]:
    """The whole document: the same for the same installation and files."""
    parts = [_part(name, one) for name, one in installed().items()]
    hashes = [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()} for file in files]
    listed = [{"type": "file", "name": file.name, "hashes": [one]} for file, one in zip(files, hashes, strict=True)]
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": [*parts, *listed]}


def _part(name: str, one: metadata.Distribution) -> dict[str, Any]:
    return {"type": "library", "name": name, "version": one.version, "purl": f"pkg:generic/{name}@{one.version}"}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where to write it")
    parser.add_argument("files", type=Path, nargs="*", help="files whose hashes are listed, such as a wheel")
    options = parser.parse_args()
    options.out.write_text(json.dumps(bill(options.files), indent=1) + "\n")
    for file in options.files:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}")
