"""Certificates for hosts without a PKI: what they open, who may read them, what is left alone."""

import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deploy.certificates import CertificateError, make_certificates
from deploy.serving.cluster_tls import tls_environment
from worker.transport.tls import NodeTls

NOW = datetime.now(UTC)


def make(directory: Path, *hosts: str, days: int = 2, now: datetime = NOW) -> list[Path]:
    return make_certificates(directory, hosts, days, now)


def test_hosts_know_each_other_by_all_their_names_and_by_no_other(tmp_path: Path) -> None:
    first, second = make(tmp_path / "ca", "10.0.0.1,head.example", "fd00::2")
    for name in ("10.0.0.1", "head.example", "localhost", "127.0.0.1", "::1"):
        NodeTls(first).check(name)
    NodeTls(second).check("fd00::2")
    with pytest.raises(OSError, match="10.0.0.1"):
        NodeTls(second).check("10.0.0.1")


def test_keys_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (host,) = make(tmp_path / "ca", "10.0.0.1")
    finally:
        os.umask(before)
    for key in (tmp_path / "ca" / "ca.key", host / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(file.name for file in host.iterdir()) == ["ca.pem", "node.key", "node.pem"]


def test_a_host_is_added_to_a_ca_that_is_there_and_nothing_is_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "ca"
    (first,) = make(directory, "10.0.0.1")
    before = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    (second,) = make(directory, "10.0.0.2")
    with pytest.raises(CertificateError, match="there already"):
        make(directory, "10.0.0.3", "10.0.0.1")
    assert not (directory / "10.0.0.3").exists()
    assert {file: file.read_bytes() for file in before} == before
    assert (second / "ca.pem").read_bytes() == (first / "ca.pem").read_bytes()


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-x", ".", "ca.pem", "ü"])
def test_a_host_has_a_name_or_an_address(tmp_path: Path, name: str) -> None:
    with pytest.raises(CertificateError):
        make(tmp_path / "ca", name)
    assert not (tmp_path / "ca").exists()


def test_half_a_ca_or_a_foreign_one_is_not_used(tmp_path: Path) -> None:
    directory = tmp_path / "ca"
    make(directory, "10.0.0.1")
    make(tmp_path / "other", "10.0.0.1")
    key = directory / "ca.key"
    key.unlink()
    with pytest.raises(CertificateError, match="ca.key is missing"):
        make(directory, "10.0.0.2")
    key.write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(CertificateError, match="no pair"):
        make(directory, "10.0.0.2")
    key.write_text("nonsense")
    with pytest.raises(CertificateError, match="cannot be read"):
        make(directory, "10.0.0.2")


def test_a_ca_may_lie_elsewhere_and_is_left_there(tmp_path: Path) -> None:
    make(tmp_path / "ca", "10.0.0.1")
    (host,) = make_certificates(tmp_path / "here", ("10.0.0.2",), 2, NOW, tmp_path / "ca")
    NodeTls(host).check("10.0.0.2")
    assert [file.name for file in (tmp_path / "here").iterdir()] == ["10.0.0.2"]
    with pytest.raises(CertificateError, match="there is no CA"):
        make_certificates(tmp_path / "here", ("10.0.0.3",), 2, NOW, tmp_path / "none")


def test_no_host_outlives_its_ca(tmp_path: Path) -> None:
    make(tmp_path / "ca", "10.0.0.1", days=2)
    with pytest.raises(CertificateError, match="fewer days"):
        make(tmp_path / "ca", "10.0.0.2", days=4000)


def test_a_nodes_environment_names_its_files_for_ray_and_for_us(tmp_path: Path) -> None:
    (host,) = make(tmp_path / "ca", "10.0.0.1")
    environment = tls_environment(host)
    assert environment["TOPWORK_CLUSTER_TLS"] == str(host)
    assert environment["RAY_USE_TLS"] == "1"
    files = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
    assert [environment[name] for name in files] == [
        str(host / name) for name in ("ca.pem", "node.pem", "node.key")
    ]


def test_a_nodes_certificate_that_others_would_not_take_is_refused(tmp_path: Path) -> None:
    (host,) = make(tmp_path / "ca", "10.0.0.1")
    (old,) = make(tmp_path / "old", "10.0.0.1", now=NOW - timedelta(days=9))
    with pytest.raises(ValueError, match="expired"):
        tls_environment(old)
    (host / "node.key").chmod(0o644)
    with pytest.raises(ValueError, match="chmod o="):
        tls_environment(host)
    (host / "node.key").chmod(0o600)
    (other,) = make(tmp_path / "other", "10.0.0.1")
    (host / "ca.pem").write_bytes((other / "ca.pem").read_bytes())
    with pytest.raises(ValueError, match="must be signed by the CA"):
        tls_environment(host)
    (host / "node.key").write_bytes((other / "node.key").read_bytes())
    with pytest.raises(OSError, match="are no pair"):
        tls_environment(host)
    (host / "node.key").unlink()
    with pytest.raises(OSError, match="node.key"):
        tls_environment(host)


def test_the_commands_make_certificates_and_take_them(tmp_path: Path) -> None:
    cli = [sys.executable, "-m", "deploy.cli"]
    ca = tmp_path / "ca"
    made = subprocess.run(
        [*cli, "certificates", str(ca), "10.0.0.1", "--days", "3"], capture_output=True, text=True
    )
    assert (made.returncode, made.stderr.strip()) == (0, str(ca / "10.0.0.1")), made.stderr
    again = subprocess.run(
        [*cli, "certificates", str(ca), "10.0.0.1"], capture_output=True, text=True
    )
    assert again.returncode == 2 and "there already" in again.stderr
    with TemporaryDirectory(prefix="tw-") as short:  # a socket's path will be in it
        wrong = subprocess.run(
            [*cli, "environment", "--directory", short, "--tls", str(tmp_path)],
            capture_output=True,
            text=True,
        )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "ca.pem" in wrong.stderr
