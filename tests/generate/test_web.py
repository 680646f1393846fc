"""The page of `isograd chat --web`: who may speak to it, and what it answers, over sockets of this computer."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from isograd.generate import Sampling, Writer, open_writer
from isograd.generate.web import LARGEST, ChatServer
from tests.generate.test_generate import folder  # noqa: F401
from verify.tests.test_html import FLAGS

HOW = Sampling(6, 1.0, seed=2)
ASKED = [{"role": "user", "content": "how are you ?"}]
LOSS = {"training": [[1, 2.5], [2, 2.0]], "held_out": [[2, 2.25]]}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ChatServer]:  # noqa: F811
    made = ChatServer(open_writer(folder), HOW, lambda: LOSS)
    thread = Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def send(server: ChatServer, method: str, path: str, body: bytes | None = None, *, token: str | None = None,
         **headers: str | list[str]) -> tuple[int, bytes, dict[str, str]]:  # fmt: skip
    """(status, body, headers). A header is left out with an empty list, and sent twice with two values."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, f"{path}?token={server.token if token is None else token}", skip_host=True)
    length = [] if body is None else str(len(body))
    given = {"Host": server.hosts[0], "Content_Type": "application/json", "Content_Length": length, **headers}
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            connection.putheader(name.replace("_", "-"), one)
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def said(server: ChatServer, messages: list[dict[str, str]], turn: int = 0) -> list[dict[str, Any]]:
    body = json.dumps({"messages": messages, "turn": turn}).encode()
    status, answer, _ = send(server, "POST", "/chat", body, Origin=f"http://{server.hosts[0]}")
    assert status == 200
    return [json.loads(line) for line in answer.splitlines()]


def text(lines: list[dict[str, Any]]) -> str:
    return "".join(line.get("text", "") for line in lines)


def test_the_page_loads_nothing_but_itself_and_runs_only_its_own_script(server: ChatServer) -> None:
    status, page, headers = send(server, "GET", "/")
    policy = headers["content-security-policy"]
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert status == 200 and page.count(f'nonce="{nonce}"'.encode()) == 2 and b"NONCE" not in page
    assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert b"http:" not in page and b"https:" not in page and b"innerHTML" not in page and b" src=" not in page
    assert nonce not in send(server, "GET", "/")[2]["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
    assert json.loads(send(server, "GET", "/loss")[1]) == LOSS
    assert send(server, "GET", "/", Host=server.hosts[1])[0] == 200  # localhost
    assert server.server_address[0] == "127.0.0.1"


REFUSED = {
    "no token": {"token": ""}, "a wrong token": {"token": "x" * 32}, "a token of other letters": {"token": "%C3%A9"},
    "another host": {"Host": "evil.example:PORT"}, "another port": {"Host": "127.0.0.1:1"},
    "no port": {"Host": "127.0.0.1"},
    "no host": {"Host": []}, "two hosts": {"Host": ["127.0.0.1:PORT", "evil.example"]},
    "another origin": {"Origin": "http://evil.example"}, "a file's origin": {"Origin": "null"},
    "another port's origin": {"Origin": "http://127.0.0.1:1"}, "https": {"Origin": "https://127.0.0.1:PORT"},
    "two origins": {"Origin": ["http://127.0.0.1:PORT", "http://evil.example"]},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_whoever_is_not_the_page_is_refused(server: ChatServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "write", lambda *_: pytest.fail("the model was asked"))
    port = str(server.server_port)
    wrong: Any = json.loads(json.dumps(REFUSED[name]).replace("PORT", port))
    for method, path, body in (("GET", "/", None), ("GET", "/loss", None), ("POST", "/chat", b'{"messages": []}')):
        status, answer, _ = send(server, method, path, body, **wrong)
        assert status == 403 and server.token.encode() not in answer and b"html" not in answer


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {"Content_Length": str(LARGEST + 1)}, 413),
        (b"", {"Content_Length": "9" * 500}, 411),
        (b"", {"Content_Length": "-1"}, 411),
        (b"", {"Content_Length": [], "Transfer_Encoding": "chunked"}, 411),
        (b"{}", {"Content_Type": "text/plain"}, 415),
        *[(body, {}, 400) for body in (
            b"", b"{", b"[]", b"3", b"{}", b'{"messages": []}', b'{"messages": [{"role": "user"}]}', b"[" * 100_000,
            b'{"messages": [{"role": "user", "content": 3}]}', b'{"messages": [{"role": "root", "content": "a"}]}',
            b'{"messages": [{"role": "assistant", "content": "a"}]}', b'{"messages": "abc"}', b"\xff",
            b'{"messages": [{"role": "user", "content": "a"}], "turn": -1}',
        )],
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(server: ChatServer, body: bytes, headers: Any, status: int) -> None:
    """A huge body before it is read: none is sent here."""
    assert send(server, "POST", "/chat", body, **headers)[0] == status
    assert send(server, "POST", "/", body or b"{}")[0] == send(server, "GET", "/other")[0] == 404


def test_an_answer_is_that_of_the_terminal_and_a_long_conversation_loses_its_oldest_turns(server: ChatServer) -> None:
    lines = said(server, ASKED, 3)
    assert lines[0] == {"left_out": 0} and lines[-1] == {"end": 1}
    assert text(lines) == "".join(server.writer.write(ASKED, HOW, 3)) != text(said(server, ASKED, 4))
    turns = [{"role": role, "content": "hello world " * 4} for _ in range(3) for role in ("user", "assistant")]
    assert said(server, [*turns, *ASKED])[0]["left_out"] > 0
    (error,) = said(server, [{"role": "user", "content": "hello " * 50}])
    assert "IG648" in error["error"]


def test_two_tabs_at_once_have_their_own_answers(server: ChatServer) -> None:
    asked = [[{"role": "user", "content": words}] for words in ("hello", "how are you ?", "world", "you !")]
    found: dict[int, str] = {}

    def tab(number: int) -> None:
        found[number] = text(said(server, asked[number], number))

    tabs = [Thread(target=tab, args=(number,)) for number in range(4)]
    for thread in tabs:
        thread.start()
    for thread in tabs:
        thread.join(60)
    assert [found[n] for n in range(4)] == ["".join(server.writer.write(asked[n], HOW, n)) for n in range(4)]


def test_a_tab_that_is_closed_in_the_middle_leaves_the_model_to_the_next(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Event()

    def write(*_: Any) -> Iterator[str]:
        try:
            while True:
                yield "a" * 10_000
        finally:
            ended.set()

    body = json.dumps({"messages": ASKED}).encode()
    head = f"POST /chat?token={server.token} HTTP/1.1\r\nHost: {server.hosts[0]}\r\nContent-Type: application/json\r\n"
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", write)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as tab:
            tab.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            seen = b""
            while b'"text"' not in seen:
                seen += tab.recv(1000)
        assert ended.wait(60)
    assert said(server, ASKED)[-1] == {"end": 1}


@pytest.mark.medium
def test_the_command_serves_a_run_s_curve_until_ctrl_c(folder: Path) -> None:  # noqa: F811
    """In a folder that looks like a run; in a browser, if there is one, the curve is drawn."""
    rows = [{"step": step, "loss": 3 - step / 10} for step in range(5)] + [
        {"event": "evaluation", "step": 4, "loss": 2.7}
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "isograd", "chat", str(folder), "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        port, token = int(address.split(":")[2].split("/")[0]), address.split("token=")[1]
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", f"/loss?token={token}")
        loss = json.loads(connection.getresponse().read())
        assert loss["training"][0] == [0, 3.0] and loss["held_out"][-1] == [4, 2.7]
        taken = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, check=False)
        assert taken.returncode == 2 and "IG644" in taken.stderr
        if chromium := shutil.which("chromium"):
            flags = [*FLAGS.split(), "--virtual-time-budget=4000", "--dump-dom", address]
            page = subprocess.run([chromium, *flags], capture_output=True, text=True, check=True, timeout=120).stdout
            assert "loss 2.6000 at step 4, held out (red) 2.7000 at step 4" in page and 'points="0,5 250,' in page
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        (folder / "metrics.jsonl").unlink()


DOCUMENT = """
const made = {}, events = [];
function element(id) {
  return made[id] ??= { id, listeners: {}, children: [], attributes: {}, className: "", textContent: "",
    value: "", hidden: id === "figure", append(p) { this.children.push(p); }, remove() { this.removed = true; },
    scrollIntoView() {},
    setAttribute(name, value) { this.attributes[name] = value; },
    addEventListener(kind, f) { this.listeners[kind] = f; } };
}
globalThis.document = { getElementById: element, createElement: (kind) => element(kind + Math.random()) };
globalThis.location = { search: new URL(process.argv[2]).search };
const real = fetch;
globalThis.fetch = (path, more) => real(new URL(path, process.argv[2]), more);
globalThis.setInterval = () => 0;
"""
TALK = """
const wait = (until) => new Promise((done) => { const look = () => until() ? done() : setTimeout(look, 10); look(); });
await wait(() => element("last").textContent);
for (const said of ["how are you ?", "hello <b>", "hello ".repeat(50), "you ?"]) {
  element("said").value = said;
  element("form").listeners.submit({ preventDefault() {} });
  await wait(() => element("stop").hidden === true);
}
const rows = element("talk").children.filter((p) => !p.removed).map((p) => [p.className, p.textContent]);
const points = element("held").attributes.points;
console.log(JSON.stringify({ rows, last: element("last").textContent, points, figure: element("figure").hidden }));
process.exit(0);
"""


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_s_script_talks_draws_and_forgets_a_refused_message(server: ChatServer, tmp_path: Path) -> None:
    """Under node, with a document of a few lines in the place of a browser's."""
    page = send(server, "GET", "/")[1].decode()
    script = page.split("<script")[1].split(">", 1)[1].split("</script>")[0].replace('"use strict";', "")
    (tmp_path / "page.mjs").write_text(DOCUMENT + script + TALK)
    command = ["node", str(tmp_path / "page.mjs"), server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["last"] == "loss 2.0000 at step 2, held out (red) 2.2500 at step 2"
    assert found["points"] == "1000,50" and found["figure"] is False
    messages: list[dict[str, str]] = []
    rows = iter(found["rows"])
    for turn, words in enumerate(["how are you ?", "hello <b>", "hello " * 50, "you ?"]):
        asked = [*messages, {"role": "user", "content": words}]
        assert next(rows) == ["user", words]
        if turn == 2:
            kind, error = next(rows)
            assert kind == "note" and "IG648" in error
            continue
        kind, answer = next(rows)
        if kind == "note":
            kind, answer = next(rows)
        fitting = server.writer.fitted(asked, HOW)
        assert [kind, answer] == ["assistant", "".join(server.writer.write(fitting, HOW, turn))]
        messages = [*asked, {"role": "assistant", "content": answer}]
