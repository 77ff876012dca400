"""deploy.certificate: what is taken for a certificate and its key, and what is said of others."""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from deploy.certificate import MAX_BYTES, read_certificate
from tests.deploy.certificates import DAY, write_certificate


def read(paths: tuple[Path, Path], now: datetime | None = None) -> str:
    return read_certificate(*paths, now or datetime.now(UTC))


def test_key_and_certificates_come_in_one_text_without_empty_lines(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    cert.write_text(f"of ours\n\n{cert.read_text()}\n\n{cert.read_text()}")
    text = read((cert, key))
    assert text.count("BEGIN CERTIFICATE") == 2
    assert text.startswith("-----BEGIN PRIVATE KEY-----\n") and text.endswith("\n")
    assert all(text.splitlines())


def test_both_may_be_in_one_file(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, rsa_bits=2048)
    both = tmp_path / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    assert read((both, both)) == read((cert, key))


def another_key(folder: Path) -> tuple[Path, Path]:
    cert, key = write_certificate(folder)
    kept = cert.read_bytes()
    write_certificate(folder)
    cert.write_bytes(kept)
    return cert, key


def with_text(name: str, text: str) -> Callable[[Path], tuple[Path, Path]]:
    def make(folder: Path) -> tuple[Path, Path]:
        paths = write_certificate(folder)
        (folder / name).write_text(text)
        return paths

    return make


BROKEN_KEY = "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (another_key, r"key in \S+/key.pem is not that of the certificate in \S+/cert.pem"),
        (with_text("cert.pem", "no PEM"), r"\S+/cert.pem holds no certificate in PEM"),
        (with_text("cert.pem", ""), "holds no certificate in PEM"),
        (with_text("key.pem", "no PEM"), r"\S+/key.pem holds no private key in PEM$"),
        (with_text("key.pem", BROKEN_KEY), "holds no private key in PEM that can be read"),
        (with_text("key.pem", "x" * (MAX_BYTES + 1)), f"over the limit of {MAX_BYTES}"),
        (lambda folder: write_certificate(folder, password=b"secret"), "key in .* is encrypted"),
        (lambda folder: write_certificate(folder, rsa_bits=1024), "1024 bits: 2048 at least"),
        (lambda folder: write_certificate(folder, valid=(-2 * DAY, -DAY)), "has expired at 20"),
        (lambda folder: write_certificate(folder, valid=(DAY, 2 * DAY)), "begins at 20"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], tuple[Path, Path]], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read(make(tmp_path))
    assert "\n" not in str(caught.value)
    assert "MIIB" not in str(caught.value)


def test_a_certificate_counts_from_its_first_second_to_its_last(tmp_path: Path) -> None:
    paths = write_certificate(tmp_path)
    now = datetime.now(UTC)
    read(paths, now + DAY - timedelta(minutes=1))
    with pytest.raises(ValueError, match="expired"):
        read(paths, now + DAY + timedelta(minutes=1))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    cert, _ = write_certificate(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.pem"):
        read((cert, tmp_path / "none.pem"))


def test_a_pipe_is_no_certificate_and_nobody_waits_for_its_other_end(tmp_path: Path) -> None:
    pipe = tmp_path / "cert.pem"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="not a regular file"):
        read_certificate(pipe, pipe, datetime.now(UTC))
