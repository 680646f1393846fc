"""The Hugging Face hub, by its own library: what a config names as hf://..., and folders that are sent there.

    hf://Qwen/Qwen3-0.6B                        a model: its config, safetensors and tokenizer, and nothing that is code
    hf://Qwen/Qwen3-0.6B@main                   of a branch, a tag or a commit
    hf://datasets/someone/chats/train.jsonl     a file of a dataset

Files lie in the library's cache and are downloaded once; its variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE)
work as everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isograd.errors import ConfigError, headline, if_not_installed

PREFIX, DATASETS = "hf://", "datasets/"
SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]  # config and tokenizer


def local(path: str, *, weights: bool = True) -> str:
    """The folder or file of this machine that hf://... names, downloaded where it is not there yet; another path as it
    is. `weights`: of a model, the weights too."""
    if not path.startswith(PREFIX):
        return path
    dataset = path.startswith(PREFIX + DATASETS)
    owner, _, rest = path.removeprefix(PREFIX).removeprefix(DATASETS if dataset else "").partition("/")
    name, _, file = rest.partition("/")
    name, _, revision = name.partition("@")
    if not owner or not name or bool(file) != dataset:
        raise ConfigError("IG654", seen="no name of that form", path=path)
    known: dict[str, Any] = {"repo_id": f"{owner}/{name}", "revision": revision or None}
    library = _library()
    try:
        if dataset:
            return str(library.hf_hub_download(filename=file, repo_type="dataset", **known))
        patterns = [*SMALL, "*.safetensors"] if weights else SMALL
        return str(library.snapshot_download(allow_patterns=patterns, **known))
    except Exception as error:  # its own errors, httpx's, and the system's
        raise ConfigError("IG654", seen=headline(error), path=path) from error


def push(folder: Path, name: str) -> str:
    """Send a folder to the hub as the model NAME, which is made where there is none, private; its address."""
    library = _library()
    try:
        made = library.create_repo(name, private=True, exist_ok=True)
        library.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Exported by isograd")
    except Exception as error:
        raise ConfigError("IG655", seen=headline(error), name=name, folder=folder) from error
    return str(made)


def _library() -> Any:
    what, fix = "names of the hub need huggingface_hub", "pip install huggingface_hub"
    with if_not_installed(lambda _: ConfigError("IG600", what, fix=fix)):
        import huggingface_hub
    return huggingface_hub
