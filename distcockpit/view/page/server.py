"""Serves the live page of running jobs, to this machine only."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
import xarray as xr
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from distcockpit.view.page.content import content
from distcockpit.view.page.html import html

HOST, PORT = "127.0.0.1", 8128


REST = 9
"""After content was built, no other is built for so many times as long: watching takes a tenth of a core at most."""


class Live:
    """The newest content of runs, rebuilt when one of them has committed.

    Args:
        tokens: Returns a token that identifies the current commit of all runs; cheap.
        runs: Opens the runs, by display name.
        refresh_seconds: How often the page polls.
    """

    def __init__(
        self, tokens: Callable[[], str], runs: Callable[[], Mapping[str, xr.DataTree]], refresh_seconds: float
    ) -> None:
        self._tokens, self._runs, self._refresh_seconds = tokens, runs, refresh_seconds
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {"token": None}
        self.rests_until = -math.inf

    def newest(self, have: str | None = None) -> dict[str, Any] | None:
        """The content; None if the caller already has it, or is to wait, see `REST`."""
        token = self._tokens()
        if token == have:
            return None
        with self._lock:  # several pages may ask at the same time
            if self._made["token"] != token and time.monotonic() >= self.rests_until:
                began = time.monotonic()
                made = content(self._runs())
                self._made = {**made, "token": token, "refresh_seconds": self._refresh_seconds}
                self.rests_until = time.monotonic() + REST * (time.monotonic() - began)
            return None if self._made["token"] == have else self._made


def application(live: Live) -> Starlette:
    """The page at ``/``, and updates at ``/data``, only under this machine's own host names.

    A foreign site whose name resolves to 127.0.0.1 (DNS rebinding) sends a different host, and is refused.
    """

    def page(request: Request) -> Response:
        try:
            made = live.newest()
            assert made is not None
            return HTMLResponse(html(made), headers=HEADERS)
        except (OSError, ValueError) as error:
            return Response(str(error), 503, media_type="text/plain")

    def data(request: Request) -> Response:
        try:
            made = live.newest(request.query_params.get("have"))
            if made is None:
                return Response(status_code=204)
            return Response(json.dumps(made, allow_nan=False), media_type="application/json", headers=HEADERS)
        except (OSError, ValueError) as error:  # it is being replaced or unreachable; the page asks again
            return Response(str(error), 503, media_type="text/plain")

    return Starlette(
        routes=[Route("/", page), Route("/data", data)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )


HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}


def serve(live: Live, port: int | None, ready: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        live: What to serve.
        port: 0 picks a free port; None picks `PORT`, or a free one if it is taken.
        ready: Called with the address.

    Raises:
        OSError: If the port is taken.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((HOST, PORT if port is None else port))
        except OSError as error:
            if port is not None:
                raise OSError(
                    f"port={port}: cannot be used, {error.strerror}. Choose another port, or 0 for any free one."
                ) from error
            bound.bind((HOST, 0))
        bound.listen()  # from here on, the address can be used
        ready(f"http://{HOST}:{bound.getsockname()[1]}/")
        config = uvicorn.Config(application(live), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[bound])
