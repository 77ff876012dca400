"""A CA of the cluster's own, and a certificate for each host, for those without a PKI.

Owns what the certificates say and how their files lie: those of a host in a folder named after it,
ready to be copied there; the CA's key beside the folders, for hosts that are added later.
"""

import os
import shutil
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from worker.transport.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE

CA_KEY_FILE = "ca.key"
OWN_NAMES = ("localhost", "127.0.0.1", "::1")  # under which a host reaches itself
_CA_DAYS = 3650  # of a CA, so that hosts can be added to it later
_CLOCK_SKEW = timedelta(hours=1)  # that a host's clock may be behind
_LONGEST_CN = 64  # letters, by X.520


class CertificateError(Exception):
    """What stands in the way of certificates; the message says what to do."""


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(
    directory: Path,
    hosts: tuple[str, ...],
    days: int,
    now: datetime,
    authority_directory: Path | None = None,
) -> list[Path]:
    """Make a certificate for each host, by the CA that lies in the directory or by a new one.

    Args:
        directory: where each host gets a folder.
        hosts: a name or an address each, or several of one host with commas between.
        days: how long the certificates are valid; a new CA is for ten years, if they do not ask
            for more.
        now: from when; with a zone.
        authority_directory: of a CA that is there, if it does not lie in `directory`.

    Returns:
        The folders of the hosts.

    Raises:
        CertificateError: if a folder or a file is there already, or the CA is of no use.
        OSError: if a file cannot be written.
    """
    names = [_names(host) for host in hosts]
    folders = [directory / of_host[0] for of_host in names]
    taken = [folder for folder in folders if folder.exists()]
    if taken:
        raise CertificateError(f"{taken[0]} is there already: nothing is overwritten")
    if len(set(folders)) < len(folders):
        raise CertificateError("a host is named twice")
    now = now.replace(microsecond=0)  # as certificates have it
    ends = now + timedelta(days=days)
    of_authority = directory if authority_directory is None else authority_directory
    if authority_directory is not None and not (of_authority / CA_KEY_FILE).exists():
        raise CertificateError(f"{of_authority / CA_KEY_FILE} is missing: there is no CA")
    authority = _authority(of_authority, now, now + timedelta(days=max(days, _CA_DAYS)))
    if authority.certificate.not_valid_after_utc < ends:
        last = authority.certificate.not_valid_after_utc
        raise CertificateError(f"the CA in {of_authority} ends on {last:%F}: ask for fewer days")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder, of_host in zip(folders, names, strict=True):
        _make_host(folder, of_host, authority, now, ends)
    return folders


def _names(host: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in host.split(",")))
    for name in names:
        is_name = name.isascii() and all(letter.isalnum() or letter in "-.:" for letter in name)
        if not is_name or not name[:1].isalnum() and ":" not in name:
            raise CertificateError(f"{name!r} is neither a host's name nor an address")
        if name in (CA_FILE, CA_KEY_FILE):
            raise CertificateError(f"{name!r} is the name of a file of the CA")
    return names


def _authority(directory: Path, now: datetime, ends: datetime) -> _Authority:
    """Return the CA of the directory; make one if there is none."""
    certificate_file, key_file = directory / CA_FILE, directory / CA_KEY_FILE
    if certificate_file.exists() != key_file.exists():
        missing = key_file if certificate_file.exists() else certificate_file
        raise CertificateError(f"{missing} is missing: a CA is its certificate and its key")
    if not key_file.exists():
        return _make_authority(directory, now, ends)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        key = load_pem_private_key(key_file.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"the CA in {directory} cannot be read: {error}") from error
    is_pair = (
        isinstance(key, ec.EllipticCurvePrivateKey) and certificate.public_key() == key.public_key()
    )
    if not is_pair:
        raise CertificateError(f"{certificate_file} and {key_file} are no pair that was made here")
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _Authority(certificate, key)


def _make_authority(directory: Path, now: datetime, ends: datetime) -> _Authority:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Topwork cluster CA")])
    builder = (
        _builder(name, name, key, now, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    certificate = builder.sign(key, SHA256())
    _write_key(directory / CA_KEY_FILE, key)
    _write(directory / CA_FILE, certificate.public_bytes(Encoding.PEM), 0o644)
    return _Authority(certificate, key)


def _make_host(
    folder: Path, names: tuple[str, ...], authority: _Authority, now: datetime, ends: datetime
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:_LONGEST_CN])])
    all_names = tuple(dict.fromkeys((*names, *OWN_NAMES)))
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    roles = x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    builder = (
        _builder(subject, authority.certificate.subject, key, now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(map(_general_name, all_names)), critical=False)
        .add_extension(roles, critical=False)
        .add_extension(signer, critical=False)
    )
    certificate = builder.sign(authority.key, SHA256())
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    _write_key(unfinished / KEY_FILE, key)
    _write(unfinished / CERTIFICATE_FILE, certificate.public_bytes(Encoding.PEM), 0o644)
    _write(unfinished / CA_FILE, authority.certificate.public_bytes(Encoding.PEM), 0o644)
    unfinished.rename(folder)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(own, critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    _write(file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)


def _write(file: Path, content: bytes, mode: int) -> None:
    """Write a file that is not there yet; it has its mode before it has content."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(content)
