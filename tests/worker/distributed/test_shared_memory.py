"""Memory without a name: who finds it, and who is kept from what else might be there."""

import ctypes
import os
from pathlib import Path

import pytest

from worker.distributed.shared_memory import SharedMemory, host_identity

NUM_BYTES = 10_000


def test_who_finds_the_memory_sees_what_is_written_to_it() -> None:
    made = SharedMemory.create(NUM_BYTES)
    found = SharedMemory.find(made.ticket, NUM_BYTES)
    made.hide()
    found.hide()
    ctypes.memset(made.address + NUM_BYTES - 1, 77, 1)
    assert ctypes.string_at(found.address, NUM_BYTES) == bytes(NUM_BYTES - 1) + b"M"


def test_hidden_memory_is_not_found() -> None:
    made = SharedMemory.create(NUM_BYTES)
    ticket = made.ticket
    made.hide()
    made.hide()
    with pytest.raises((OSError, ValueError)):
        SharedMemory.find(ticket, NUM_BYTES)


@pytest.mark.parametrize("num_bytes", [NUM_BYTES - 1, NUM_BYTES + 1])
def test_memory_of_another_size_is_not_mapped(num_bytes: int) -> None:
    made = SharedMemory.create(NUM_BYTES)
    with pytest.raises(ValueError, match="size"):
        SharedMemory.find(made.ticket, num_bytes)
    made.hide()


def test_memory_of_another_group_is_not_taken_for_ours() -> None:
    ours, theirs = SharedMemory.create(NUM_BYTES), SharedMemory.create(NUM_BYTES)
    ticket = f"{theirs.ticket.split()[0]} {ours.ticket.split()[1]}"
    with pytest.raises(ValueError, match="of others"):
        SharedMemory.find(ticket, NUM_BYTES)
    ours.hide()
    theirs.hide()


def test_a_file_of_another_kind_is_not_even_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    file = os.open(fifo, os.O_RDWR)
    with pytest.raises(ValueError, match="no shared memory"):
        SharedMemory.find(f"/proc/{os.getpid()}/fd/{file} 00", NUM_BYTES)
    os.close(file)


def test_memory_whose_size_is_not_sealed_is_not_mapped() -> None:
    file = os.memfd_create("topwork")
    os.ftruncate(file, 4096 + NUM_BYTES)
    with pytest.raises(ValueError, match="sealed"):
        SharedMemory.find(f"/proc/{os.getpid()}/fd/{file} {'00' * 32}", NUM_BYTES)
    os.close(file)


def test_nobody_can_cut_off_what_others_have_mapped() -> None:
    made = SharedMemory.create(NUM_BYTES)
    file = os.open(made.ticket.split()[0], os.O_RDWR)
    for num_bytes in (0, 10 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(file, num_bytes)
    os.close(file)
    made.hide()


def test_a_host_knows_itself() -> None:
    assert host_identity() and host_identity() == host_identity()
