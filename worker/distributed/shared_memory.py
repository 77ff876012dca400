"""Anonymous memory (memfd) that processes of one host share.

Owns how it is made, found by the processes that get its ticket, and checked. It lives as long as a
process has mapped it, so one that is killed leaves nothing behind; its size is sealed, so that none
can cut off what another has mapped.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
from pathlib import Path

_NAME = "topwork"  # seen in /proc alone, and need not be unique
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NONCE_BYTES = 32


class SharedMemory:
    """One process's mapping; use `create` or `find`."""

    def __init__(self, file: int, num_bytes: int) -> None:
        """Map the open file, which becomes this object's, behind the page of the nonce."""
        self._file: int | None = file
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page is first touched during a step
        self._map = mmap.mmap(file, mmap.PAGESIZE + num_bytes, flags=flags)
        # Never unmapped by hand: a call may be under way in another thread.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + mmap.PAGESIZE

    @classmethod
    def create(cls, num_bytes: int) -> "SharedMemory":
        """Return new memory, all zeros.

        Raises:
            OSError: if there is none to be had.
        """
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Taken now: what is missing later ends the process that touches it.
            os.posix_fallocate(file, 0, mmap.PAGESIZE + num_bytes)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            memory = cls(file, num_bytes)
        except OSError:
            os.close(file)
            raise
        memory._map[:_NONCE_BYTES] = secrets.token_bytes(_NONCE_BYTES)
        return memory

    @classmethod
    def find(cls, ticket: str, num_bytes: int) -> "SharedMemory":
        """Return the memory of another process's ticket, unless that has hidden it.

        Raises:
            OSError: if there is none, or it is not ours to open.
            ValueError: if the ticket leads to something else.
        """
        path, nonce = ticket.rsplit(" ", 1)
        # To open a stranger's file may have effects, so its kind is looked at first.
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise ValueError(f"{path} is no shared memory of ours")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            is_sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not is_sealed or os.fstat(file).st_size != mmap.PAGESIZE + num_bytes:
                raise ValueError(f"{path} has not the size that was agreed on, sealed")
            memory = cls(file, num_bytes)
            if memory._map[:_NONCE_BYTES].hex() != nonce:
                raise ValueError(f"{path} is the shared memory of others")
        except (OSError, ValueError):
            os.close(file)
            raise
        return memory

    @property
    def ticket(self) -> str:
        """Return what `find` needs in another process of this host."""
        assert self._file is not None, "the memory has been hidden"
        return f"/proc/{os.getpid()}/fd/{self._file} {self._map[:_NONCE_BYTES].hex()}"

    def hide(self) -> None:
        """Void the ticket; what has been mapped stays so."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def host_identity() -> str:
    """Return what only processes with one kernel and one /proc have in common; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
