"""An object service on this machine that speaks as much of S3's protocol as a storage needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

REGION = "us-east-1"


class ObjectService(ThreadingHTTPServer):
    """One bucket, `bucket`. `status`, if set, is the answer to everything; `hold` delays answers until it is set."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.status: int | None = None
        self.hold = threading.Event()
        self.hold.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def options(self) -> dict[str, str]:
        return {
            "aws_endpoint": self.url,
            "aws_region": REGION,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "client_allow_http": "true",
        }


@contextmanager
def object_service() -> Iterator[ObjectService]:
    service = ObjectService()
    thread = threading.Thread(target=service.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.hold.set()
        service.shutdown()
        thread.join()
        service.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectService

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.hold.wait()
        address = urlsplit(self.path)
        name = unquote(address.path).removeprefix("/bucket").removeprefix("/")
        query = parse_qs(address.query, keep_blank_values=True)
        objects = self.server.objects
        if self.server.status is not None:
            self._answer(self.server.status)
        elif "list-type" in query:
            self._answer(200, self._listing(query.get("prefix", [""])[0]))
        elif "delete" in query:
            keys = [each.text or "" for each in ElementTree.fromstring(body).iter() if each.tag.endswith("Key")]
            deleted = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in keys)
            for each in keys:
                objects.pop(each, None)
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        elif self.command == "PUT":
            objects[name] = body
            self._answer(200)
        elif self.command == "DELETE":
            objects.pop(name, None)
            self._answer(204)
        elif name in objects:
            self._answer(200, objects[name])
        else:
            self._answer(404)

    def _listing(self, prefix: str) -> bytes:
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>e</ETag><Size>{len(body)}</Size></Contents>"
            for name, body in sorted(self.server.objects.items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"e"')
        self.send_header("Connection", "close")  # so that nobody is served when the service is gone
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
