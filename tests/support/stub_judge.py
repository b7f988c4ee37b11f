"""A real HTTP server that answers chat completions by a script, for tests of rewards that ask one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    content: Any = '{"reason": "fine", "score": 5}'
    """Of the message; or the whole body, where it is bytes."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    finish_reason: str = "stop"


Script = Callable[[dict[str, Any], int], Reply]
"""(body of the request, its number from 0) -> reply."""


@dataclass
class StubServer:
    script: Script
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: dict[str, Any], headers: dict[str, str], path: str) -> Reply:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        reply = self.script(body, number)
        time.sleep(reply.delay)
        with self._lock:
            self._at_once -= 1
        return reply


def grade(score: Any, reason: str = "so") -> Reply:
    return Reply(json.dumps({"reason": reason, "score": score}))


def question(body: dict[str, Any]) -> str:
    """What the judge was shown."""
    return str(body["messages"][-1]["content"])


@contextmanager
def judge_server(script: Script) -> Iterator[StubServer]:
    stub = StubServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = stub.reply(body, {name.lower(): value for name, value in self.headers.items()}, self.path)
            if isinstance(reply.content, bytes):
                data = reply.content
            else:
                message = {"role": "assistant", "content": reply.content}
                choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
                data = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
            try:
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except ConnectionError:  # the client has given up
                self.close_connection = True

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    stub.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
