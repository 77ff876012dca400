"""Hosts on this machine that adapters are fetched from: plain, over TLS, and as a hub."""

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Host:
    """Answers by path: bytes, a status, or (status, headers, body)."""

    answers: dict[str, bytes | int | tuple[int, dict[str, str], bytes]] = field(
        default_factory=dict
    )
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    port: int = 0

    def put(self, folder: str, config: bytes, weights: bytes) -> None:
        """Have an adapter in a folder."""
        self.answers[f"{folder}/adapter_config.json"] = config
        self.answers[f"{folder}/adapter_model.safetensors"] = weights


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[Host]:
    """Serve a host on this machine."""
    host = Host()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            host.asked.append(path)
            host.headers.append({key.lower(): value for key, value in self.headers.items()})
            answer = host.answers.get(path, 404)
            if isinstance(answer, bytes):
                answer = (200, {}, answer)
            elif isinstance(answer, int):
                answer = (answer, {}, b"")
            status, headers, body = answer
            self.send_response(status)
            self.send_header("Content-Length", headers.get("Content-Length", str(len(body))))
            for key, value in headers.items():
                if key != "Content-Length":
                    self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)
            if int(headers.get("Content-Length", 0)) > len(body):
                self.close_connection = True  # in the middle

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    host.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield host
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def certificate(folder: Path) -> Path:
    """Return a new certificate of this machine, which is its own authority, with its key."""
    file = folder / "certificate.pem"
    options = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        ["openssl", "req", "-x509", *options, *names, "-keyout", file, "-out", folder / "one"],
        check=True,
        capture_output=True,
    )
    file.write_bytes(file.read_bytes() + (folder / "one").read_bytes())
    return file


def as_hub(host: Host, repo: str, revision: str, files: dict[str, bytes]) -> None:
    """Have a repository as huggingface_hub asks for it, at one commit."""
    siblings = [{"rfilename": name} for name in files]
    info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
    host.answers[f"/api/models/{repo}/revision/{revision}"] = json.dumps(info).encode()
    host.answers[f"/api/models/{repo}/revision/{COMMIT}"] = json.dumps(info).encode()
    if revision == "main":
        host.answers[f"/api/models/{repo}"] = json.dumps(info).encode()
    tree = [
        {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
        for name, data in files.items()
    ]
    host.answers[f"/api/models/{repo}/paths-info/{COMMIT}"] = json.dumps(tree).encode()
    host.answers[f"/api/models/{repo}/tree/{COMMIT}"] = json.dumps(tree).encode()
    for name, data in files.items():
        headers = {"ETag": '"0"', "X-Repo-Commit": COMMIT}
        host.answers[f"/{repo}/resolve/{COMMIT}/{name}"] = (200, headers, data)
