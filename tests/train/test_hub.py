"""Models and data by the names of the Hugging Face hub, by its own library, from and to a server of this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from isograd.data import builtin_chats
from isograd.errors import ConfigError
from isograd.io import hub
from isograd.train import journal

pytest.importorskip("transformers")
SHA = "1" * 40
RUN: dict[str, Any] = {
    "run": "runs/first", "task": "chat", "model": {"preset": "tiny-llama", "options": {"vocab": 259}}, "steps": 2,
    "data": {"sources": [{"path": "hf://datasets/me/chats/data/chats.jsonl"}], "length": 128},
    "optimizer": {"lr": 1e-3}, "batch": 2, "log": {"sample": 0},
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """What the library asks of a hub: repositories are {name: {file: bytes}}, and all of them have one commit."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        self.asked.append(f"{self.command} {self.path}")
        if parts[0] == "api" and "/".join(parts[2:4]) in self.repositories:
            name = "/".join(parts[2:4])
            stored = self.repositories[name]
            if parts[4] == "tree":
                return self.answer([{"type": "file", "oid": SHA, "size": len(b), "path": n} for n, b in stored.items()])
            files = [{"rfilename": file} for file in stored]
            return self.answer({"id": name, "modelId": name, "sha": SHA, "siblings": files, "private": True})
        parts = parts[1:] if parts[0] == "datasets" else parts
        found = self.repositories.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        if len(parts) < 5 or found is None:
            kind = "RepoNotFound" if "/".join(parts[:2]) not in self.repositories else "EntryNotFound"
            return self.answer({"error": "not here"}, 404, X_Error_Code=kind)
        return self.answer(found, ETag=f'"{hashlib.sha256(found).hexdigest()}"', X_Repo_Commit=SHA)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(f"POST {self.path} {self.headers.get('Authorization')}")
        if self.path == "/api/repos/create":
            given = json.loads(raw)
            name = f"{given['organization']}/{given['name']}"
            self.repositories.setdefault(name, {})
            self.asked.append(f"private {given.get('private', given.get('visibility'))}")
            return self.answer({"url": f"http://{self.headers['Host']}/{name}"})
        name = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(raw)["files"]
            ]
            return self.answer({"files": files})
        for line in map(json.loads, raw.decode().splitlines()):
            if line["key"] == "file":
                self.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer({"success": True, "commitOid": SHA, "commitUrl": f"http://{self.headers['Host']}/{name}"})


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[type[Hub]]:
    """A hub on this machine, with a dataset; programs that are started ask it, and keep their own cache."""
    (tmp_path / "made").mkdir()
    chats = builtin_chats.conversations(tmp_path / "made" / "chats.jsonl", "sums")
    kind = type("Here", (Hub,), {"repositories": {"me/chats": {"data/chats.jsonl": chats.read_bytes()}}, "asked": []})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{httpd.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield kind
    httpd.shutdown()
    httpd.server_close()


def isograd(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "isograd", *words], cwd=folder, capture_output=True, text=True, timeout=200,
        env={**os.environ, "NO_PROXY": "127.0.0.1"}, check=False,
    )  # fmt: skip
    return f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.medium
def test_a_model_is_pushed_to_the_hub_and_trained_and_asked_by_its_name(server: type[Hub], tmp_path: Path) -> None:
    tokenizer = builtin_chats.tokenizer(tmp_path / "tokenizer")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "data": {**RUN["data"], "tokenizer": str(tokenizer)}}))
    said = isograd(tmp_path, "train", "run.yaml")
    assert said.startswith("0\n"), said
    words = ["--tokenizer", "tokenizer", "--push-to-hub", "me/small"]
    said = isograd(tmp_path, "ckpt", "convert", "runs/first/checkpoints", "small", *words)
    assert said.startswith("0\n") and "/me/small, private there" in said, said
    assert "private True" in server.asked or "private private" in server.asked
    sent = server.repositories["me/small"]
    assert sent.keys() == {file.name for file in (tmp_path / "small").iterdir()}
    assert all((tmp_path / "small" / name).read_bytes() == content for name, content in sent.items())
    sent |= {"pytorch_model.bin": b"a pickle", "modeling.py": b"raise SystemExit"}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**RUN, "run": "runs/second", "model": {"path": "hf://me/small"}})
    )
    assert isograd(tmp_path, "train", "run.yaml").startswith("0\n")
    first, second = (
        [line["loss"] for line in journal.read(tmp_path / "runs" / name / "metrics.jsonl") if "event" not in line]
        for name in ("first", "second")
    )
    assert second[0] < first[0]
    cached = {file.name for file in (tmp_path / "cache").rglob("*") if "snapshots" in file.parts}
    assert {"model.safetensors", "tokenizer.json", "chats.jsonl"} <= cached
    assert not {"pytorch_model.bin", "modeling.py"} & cached
    assert isograd(tmp_path, "generate", "hf://me/small", "1 + 1", "--max-new-tokens", "3").startswith("0\n")
    said = isograd(tmp_path, "train", "run.yaml", "--model.path", "hf://me/nothing", "--run", "runs/third")
    assert said.startswith("2\n") and "IG654" in said and "HF_TOKEN" in said and "hf_of_this_test" not in said


@pytest.mark.parametrize("path", ["hf://alone", "hf://a/b/c", "hf://datasets/a/b", "hf:///b"])
def test_a_name_of_another_form_is_refused_before_anything_is_asked(path: str) -> None:
    with pytest.raises(ConfigError, match="IG654"):
        hub.local(path)
    assert hub.local("models/base") == "models/base"
