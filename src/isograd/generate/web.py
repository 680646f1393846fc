"""`isograd chat --web`: one page with a run's loss curve and a conversation with its model, for this computer alone.

The server is the standard library's, listens on 127.0.0.1, and answers whoever has the token in the address that the
command prints. Another page in the same browser has no token; were it to guess one, its name would stand in Origin, or
in Host if it made its own name mean 127.0.0.1 (DNS rebinding). All three are looked at before a body is read.

The conversation is the page's: the server keeps none, so each tab has its own. Answers are written one at a time.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from isograd.errors import headline
from isograd.generate.sampling import Sampling
from isograd.generate.writer import Writer
from isograd.io.untrusted import parse_line

LARGEST = 1 << 20  # bytes of a request's body
MOST_TURNS = 1 << 30
ROLES = ("system", "user", "assistant")
Loss = Callable[[], dict[str, Any]]


class ChatServer(ThreadingHTTPServer):
    """`address` is what a person opens; `serve_forever` answers."""

    daemon_threads = True

    def __init__(self, writer: Writer, how: Sampling, loss: Loss, system: str | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Request)
        self.writer, self.how, self.loss, self.system = writer, how, loss, system
        self.token = secrets.token_urlsafe(24)
        self.writing = Lock()  # the model's
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]

    @property
    def address(self) -> str:
        """The page, with the token."""
        return f"http://{self.hosts[0]}/?token={self.token}"


class _Request(BaseHTTPRequestHandler):
    server: ChatServer
    timeout = 30  # of a read or a write: a client that sends half a request holds a thread no longer
    server_version = sys_version = ""

    def do_GET(self) -> None:
        """The page, or the loss curve."""
        path = self._allowed()
        if path == "/":
            nonce = secrets.token_urlsafe(16)
            policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            policy += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            page = (files("isograd.generate") / "page.html").read_text(encoding="utf-8").replace("NONCE", nonce)
            self._answer(200, page.encode(), "text/html; charset=utf-8", policy)
        elif path == "/loss":
            self._answer(200, json.dumps(self.server.loss()).encode(), "application/json")
        elif path is not None:
            self._refuse(404, "no such page")

    def do_POST(self) -> None:
        """An answer of the model, as lines of JSON while it is written."""
        path = self._allowed()
        if path is None:
            return
        length = self.headers.get("Content-Length", "")
        if path != "/chat":
            self._refuse(404, "no such page")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(415, "application/json is expected")
        elif not length.isdecimal() or len(length) > 12:
            self._refuse(411, "a Content-Length is expected")
        elif int(length) > LARGEST:
            self._refuse(413, f"a body of at most {LARGEST:,} bytes is expected")
        elif (asked := _conversation(self.rfile.read(int(length)))) is None:
            self._refuse(400, '{"messages": [{"role": "user", "content": "..."}], "turn": 0} is expected')
        else:
            self._write(*asked)

    def _write(self, messages: list[dict[str, str]], turn: int) -> None:
        server = self.server
        if server.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": server.system}, *messages]
        self._head(200, "application/x-ndjson")
        try:
            with server.writing:
                fitting = server.writer.fitted(messages, server.how)
                self._line({"left_out": len(messages) - len(fitting)})
                for piece in server.writer.write(fitting, server.how, turn):
                    self._line({"text": piece})
            self._line({"end": 1})
        except OSError:  # the tab was closed, or "stop" pressed: the answer ends, too
            return
        except Exception as error:  # a template may refuse a conversation in any way: the page says how
            self._line({"error": headline(error)})

    def _line(self, value: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(value).encode() + b"\n")
        self.wfile.flush()

    def _allowed(self) -> str | None:
        """The path, if whoever asks may; else None, and the refusal is sent."""
        asked = urlsplit(self.path)
        token = parse_qs(asked.query).get("token", [""])[0]
        origins = self.headers.get_all("Origin", [])
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            self._refuse(403, "another Host")
        elif any(origin not in [f"http://{host}" for host in self.server.hosts] for origin in origins):
            self._refuse(403, "another Origin")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(403, "the address that 'isograd chat --web' has printed ends with a token")
        else:
            return asked.path
        return None

    def _refuse(self, code: int, why: str) -> None:
        self._answer(code, why.encode(), "text/plain; charset=utf-8")

    def _answer(self, code: int, body: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self._head(code, kind, policy, len(body))
        self.wfile.write(body)

    def _head(self, code: int, kind: str, policy: str = "default-src 'none'", length: int | None = None) -> None:
        self.send_response(code)
        more = {} if length is None else {"Content-Length": str(length)}
        for name, value in {
            "Content-Type": kind, "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "Connection": "close", **more,
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal would show tokens."""


def _conversation(body: bytes) -> tuple[list[dict[str, str]], int] | None:
    """(messages, number of the turn) of a request; None if it is none."""
    try:
        found = parse_line(body)
        messages, turn = found["messages"], found.get("turn", 0)
        said = [{"role": one["role"], "content": one["content"]} for one in messages]
        texts = all(one["role"] in ROLES and isinstance(one["content"], str) for one in said)
        if texts and said[-1]["role"] == "user" and type(turn) is int and 0 <= turn < MOST_TURNS:
            return said, turn
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        pass
    return None
