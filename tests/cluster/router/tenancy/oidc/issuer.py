"""An OpenID Connect issuer on this host, that serves its keys, changes them and goes away."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "topwork"
NOW = 1_800_000_000.0  # seconds since 1970, where a test has a clock of its own


def segment(value: Any) -> str:
    """Return a segment of a token."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Signer:
    """A private key with an id."""

    def __init__(self, kid: str | None, algorithm: str = "ES256") -> None:
        self.kid = kid
        self.algorithm = algorithm
        self.private: Any
        if algorithm.startswith("ES"):
            curve = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}
            self.private = ec.generate_private_key(curve[algorithm]())
            self._as_jwk: Any = ECAlgorithm.to_jwk
        elif algorithm == "EdDSA":
            self.private = ed25519.Ed25519PrivateKey.generate()
            self._as_jwk = OKPAlgorithm.to_jwk
        else:
            self.private = rsa.generate_private_key(65537, 2048)
            self._as_jwk = RSAAlgorithm.to_jwk

    @property
    def public_pem(self) -> bytes:
        pem: bytes = self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return pem

    def jwk(self, **changes: Any) -> dict[str, Any]:
        """Return the public key as a key set has it."""
        jwk = self._as_jwk(self.private.public_key(), as_dict=True)
        return {**jwk, "use": "sig", "kid": self.kid, **changes}

    def token(self, claims: dict[str, Any], **header: Any) -> str:
        headers = {"kid": self.kid, **header} if self.kid is not None else header
        return jwt.encode(claims, self.private, self.algorithm, headers=headers)


def key_set(*signers: Signer) -> bytes:
    return json.dumps({"keys": [signer.jwk() for signer in signers]}).encode()


class Issuer:
    """Serves discovery and keys until it is closed; what it answers can be changed."""

    def __init__(self, *signers: Signer) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked.append(self.path)
                status, body = issuer.answers.get(self.path, (404, b""))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._handler = Handler
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.rotate(*signers)
        discovery = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        self.answers["/.well-known/openid-configuration"] = (200, json.dumps(discovery).encode())
        self._serve()

    @property
    def num_fetches(self) -> int:
        return self.asked.count("/keys")

    def rotate(self, *signers: Signer) -> None:
        self.answers["/keys"] = (200, key_set(*signers))

    def leave(self) -> None:
        """Let nobody connect."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def come_back(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self._serve()

    def _serve(self) -> None:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def claims(self, now: float, **changes: Any) -> dict[str, Any]:
        """Return the claims of a token that is good for five minutes; None: leave one out."""
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "user-7",
            "iat": int(now),
            "nbf": int(now),
            "exp": int(now) + 300,
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}
