"""A local server for rewards that ask one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Service:
    """Answers with what ``answer(body)`` says, (status, object), and notes requests and how many there were at once."""

    def __init__(self, answer):
        self.requests, self.headers, self.paths, self.busy, self.most = [], [], [], 0, 0
        lock, service = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    service.requests.append(body)
                    service.headers.append(dict(self.headers))
                    service.paths.append(self.path)
                    service.busy += 1
                    service.most = max(service.most, service.busy)
                    place = len(service.requests)
                try:
                    status, given = answer(body, place)
                finally:
                    with lock:
                        service.busy -= 1
                data = given if isinstance(given, bytes) else json.dumps(given).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if status in (301, 302):
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.root = f"http://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.root}/score"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def serve():
    services = []

    def start(answer):
        services.append(Service(answer))
        return services[-1]

    yield start
    for service in services:
        service.server.shutdown()
        service.server.server_close()
