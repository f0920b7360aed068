"""Stores for tests: a folder, memory, and S3 on loopback behind a proxy that can fail."""

from __future__ import annotations

import http.client
import logging
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from waiting import HANG
from zarr.storage import MemoryStore

BUCKET = "runs"


@dataclass
class Place:
    """A place for a store: what is given to DistCockpit and to open_run."""

    store: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def for_cockpit(self) -> dict[str, Any]:
        return {"store": self.store, **({"storage_options": self.options} if self.options else {})}


class Proxy(ThreadingHTTPServer):
    """Hands requests on to an S3 server, unless its ``mode`` is "500", "hang" or "gone"."""

    daemon_threads = True
    allow_reuse_address = True
    mode = "ok"

    def __init__(self, port: int) -> None:
        self.behind, self.refused = port, 0
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.mode != "ok":
            self.server.refused += 1
        if self.server.mode == "gone":  # the connection ends without an answer
            self.close_connection = True
            return
        if self.server.mode == "hang":
            while self.server.mode == "hang":
                time.sleep(0.05)
            self.close_connection = True  # a late request must not overwrite what came after it
            return
        if self.server.mode == "500":
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        connection.request(self.command, self.path, body, dict(self.headers))
        reply = connection.getresponse()
        data = reply.read()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        length = reply.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

    def log_message(self, *args: Any) -> None:
        pass


@dataclass
class S3:
    """A server and its proxy."""

    proxy: Proxy

    def place(self, seconds: float = HANG) -> Place:
        """A store that is asked for so long until it counts as one that does not answer."""
        quick = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"max_attempts": 1}}
        return Place(
            f"s3://{BUCKET}/{uuid.uuid4().hex}/run.zarr",
            {
                "endpoint_url": f"http://127.0.0.1:{self.proxy.server_address[1]}",
                "key": "key",
                "secret": "secret",
                "config_kwargs": quick,
                "client_kwargs": {"region_name": "us-east-1"},
            },
        )


@contextmanager
def s3_server() -> Generator[S3, None, None]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    proxy = Proxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield S3(proxy)
    proxy.shutdown()
    server.stop()


def place(kind: str, tmp_path: Path, s3: S3) -> Place:
    if kind == "disk":
        return Place(tmp_path / "run")
    return Place(MemoryStore()) if kind == "memory" else s3.place()
