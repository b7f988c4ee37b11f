"""A Hub on the loopback interface: as much of its HTTP interface as an upload needs. Files end up in a folder."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USER = "someone"


Fault = Callable[[str, str], int | None]
"""Of method and path: a status to answer with instead, 0 to close the connection, None to answer."""


@contextmanager
def stub_hub(folder: Path, *, fault: Fault = lambda method, path: None) -> Iterator[str]:
    """Serves until the block ends; yields the address, for `HF_ENDPOINT`.

    A model that is pushed as NAME is written to `folder/NAME`. The server never has any file to offer. Content that is
    in `folder/large` already is not asked for again.
    """
    handler = type("Handler", (_Handler,), {"folder": folder, "fault": staticmethod(fault)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    fault: Fault
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._fails():
            return
        self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """Content of a large file, by its hash."""
        body = self._body()
        if self._fails():
            return
        large = self.folder / "large"
        large.mkdir(exist_ok=True)
        (large / Path(self.path).name).write_bytes(body)
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self._body()
        if self._fails():
            return
        if self.path == "/api/repos/create":
            name = f"{USER}/{json.loads(body)['name']}"
            self._answer(200, {"url": f"{self._address()}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._answer(200, {"files": [_upload_mode(path) for path in paths]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [self._large_file(item) for item in json.loads(body)["objects"]]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            name = self.path.split("/")[4]
            self._commit(self.folder / name, [json.loads(line) for line in body.splitlines()])
            commit = f"{self._address()}/{USER}/{name}/commit/{'0' * 40}"
            self._answer(200, {"commitUrl": commit, "commitOid": "0" * 40, "success": True})
        else:
            self._answer(501, {"error": f"the stub knows no {self.path}"})

    def _fails(self) -> bool:
        status = self.fault(self.command, self.path)
        if status is None:
            return False
        if status == 0:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._answer(status, {"error": f"status {status} was asked for"})
        return True

    def _large_file(self, item: dict[str, Any]) -> dict[str, Any]:
        if (self.folder / "large" / item["oid"]).is_file():
            return item
        return {**item, "actions": {"upload": {"href": f"{self._address()}/large/{item['oid']}"}}}

    def _commit(self, target: Path, operations: list[dict[str, Any]]) -> None:
        target.mkdir(exist_ok=True)
        for operation in operations:
            value = operation["value"]
            if operation["key"] in ("file", "lfsFile"):
                (target / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            if operation["key"] == "file":
                (target / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                shutil.copyfile(self.folder / "large" / value["oid"], target / value["path"])

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the screen."""


def _upload_mode(path: str) -> dict[str, Any]:
    return {
        "path": path,
        "uploadMode": "lfs" if path.endswith((".safetensors", ".gguf")) else "regular",
        "shouldIgnore": False,
    }
