"""Certificates of tests, signed by themselves."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


def write_certificate(
    folder: Path,
    name: str = "localhost",
    *,
    valid: tuple[timedelta, timedelta] = (-DAY, DAY),
    rsa_bits: int = 0,
    password: bytes | None = None,
) -> tuple[Path, Path]:
    """Write a certificate and its key, and return their paths.

    Args:
        folder: where; what was there of the same names is replaced.
        name: of whom, beside localhost and 127.0.0.1.
        valid: from when to when, counted from now.
        rsa_bits: of an RSA key; 0: the key is one of P-256.
        password: that the key is encrypted with.
    """
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
    if rsa_bits:
        key = rsa.generate_private_key(65_537, rsa_bits)
    else:
        key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [
        *(x509.DNSName(one) for one in (name, "localhost")),
        x509.IPAddress(ip_address("127.0.0.1")),
    ]
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + valid[0])
        .not_valid_after(now + valid[1])
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(Encoding.PEM))
    hidden = NoEncryption() if password is None else BestAvailableEncryption(password)
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))
    return cert_path, key_path
