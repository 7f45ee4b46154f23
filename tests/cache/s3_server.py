"""An S3 server on this machine that also fails, stalls and cuts off: `python s3_server.py`, prints its port.

What goes wrong next is put to `/_faults`, a JSON list of [method, what]: what is a status (503), "stall", or "cut".
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

STALL = 3.0
faults: list[list[Any]] = []
lock = threading.Lock()
app = DomainDispatcherApplication(create_backend_app)


def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
    if path == "/_faults":
        if method == "PUT":
            faults[:] = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(faults).encode()]
    with lock:
        found = next(
            (fault for fault in faults if fault[0] == method and ("/blobs/" in path or "/packs/" in path)), None
        )
        if found is not None:
            faults.remove(found)
    what = found[1] if found else None
    if isinstance(what, int):
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{what} Slow Down", [("Content-Length", "0")])
        return [b""]
    if what == "stall":
        time.sleep(STALL)
    body = b"".join(app(environ, start_response))
    return [body[: len(body) // 2]] if what == "cut" else [body]


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, serve, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()
