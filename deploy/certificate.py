"""The certificate of the front door: what its files may hold, and what HAProxy gets of them.

The same checks at the start, by `topwork check` and whenever the files have changed. Nothing of a
key is in any message.
"""

import re
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from worker.regular_file import read_bounded

MAX_BYTES = 24 * 1024  # of each file: HAProxy takes both in one message of 64 KiB
MIN_RSA_BITS = 2048  # OpenSSL refuses less
_KEY = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL)


def read_pem(path: Path) -> bytes:
    """Return a file that may hold a certificate or a key.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is too large for one, or no file.
    """
    try:
        return read_bounded(path, MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} is no certificate or key: {error}") from None


def combined(cert: bytes, key: bytes, cert_path: Path, key_path: Path, now: datetime) -> str:
    """Return the key, the certificate and those behind it in one PEM without empty lines.

    Args:
        cert: what the file of the certificate holds, its own first.
        key: what the file of the key holds; it may be the same file.
        cert_path: for messages.
        key_path: for messages.
        now: with a zone.

    Raises:
        ValueError: if HAProxy or its clients would not take them; the message is one line.
    """
    try:
        chain = x509.load_pem_x509_certificates(cert)
        public = chain[0].public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{cert_path} holds no certificate in PEM: {_line(error)}") from None
    private = _private_key(key, key_path)
    own = private.public_key()
    as_der = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*as_der) != own.public_bytes(*as_der):
        raise ValueError(f"the key in {key_path} is not that of the certificate in {cert_path}")
    if isinstance(own, rsa.RSAPublicKey) and own.key_size < MIN_RSA_BITS:
        raise ValueError(f"the key in {key_path} has {own.key_size} bits: {MIN_RSA_BITS} at least")
    begin, end = chain[0].not_valid_before_utc, chain[0].not_valid_after_utc
    if not begin <= now <= end:
        what = f"has expired at {end:%Y-%m-%d %H:%M}" if now > end else f"begins at {begin:%F %R}"
        raise ValueError(f"the certificate in {cert_path} {what} UTC")
    parts = [private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())]
    parts += [one.public_bytes(Encoding.PEM) for one in chain]
    return b"".join(parts).decode()


def read_certificate(cert_path: Path, key_path: Path, now: datetime) -> str:
    """Return what `combined` makes of two files.

    Raises:
        OSError: if one cannot be read.
        ValueError: as `read_pem` and `combined`.
    """
    return combined(read_pem(cert_path), read_pem(key_path), cert_path, key_path, now)


def _private_key(data: bytes, path: Path) -> PrivateKeyTypes:
    found = _KEY.search(data)
    if found is None:
        raise ValueError(f"{path} holds no private key in PEM")
    try:
        return load_pem_private_key(found[0], password=None)
    except TypeError:
        raise ValueError(
            f"the key in {path} is encrypted, and nobody can be asked for its password"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError(f"{path} holds no private key in PEM that can be read") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
