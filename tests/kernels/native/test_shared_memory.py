"""shared_memory.c among processes that write what they like into the shared region."""

import ctypes
import mmap
import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.native.library import ExchangeState, Library, native_library
from tests.patience import PATIENCE

SIZE = 3
HEADER_BYTES, SEGMENT_BYTES = 128, 4096
REGION_BYTES = SIZE * (HEADER_BYTES + 2 * SEGMENT_BYTES)
ROW_BYTES = (400, 12, 7000)
NUM_ROWS = 10
DONE, NOT_YET, BROKEN = 0, 1, 2


@pytest.mark.parametrize("rank", [0, 2])
def test_whatever_others_write_no_rank_reads_or_writes_outside_the_region(rank: int) -> None:
    if native_library() is None:
        pytest.skip("this machine cannot have the native library")
    process = multiprocessing.get_context("spawn").Process(target=call_among_liars, args=(rank,))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0


def call_among_liars(rank: int) -> None:
    """Run in a process of its own: a step outside ends it by a signal."""
    library, draw = native_library(), random.Random(7)
    assert library is not None
    area, region = fenced(REGION_BYTES)
    longest = max(NUM_ROWS * sum(ROW_BYTES) // 4, 5000)
    x, out = torch.zeros(longest), torch.zeros(longest)
    row_bytes = (ctypes.c_int64 * SIZE)(*ROW_BYTES)
    seen = set()
    for _ in range(800):
        start = draw.choice([0, 1, 5, (1 << 64) - 3])
        is_gather = draw.random() < 0.3
        count = draw.choice([1, 100, 1024, 1025, 5000])
        call = NUM_ROWS * sum(ROW_BYTES) * 4 + 2 if is_gather else count * 4
        lie(region, start, call, draw)
        state = ExchangeState(region, rank, SIZE, SEGMENT_BYTES, 10, start, start)
        address = ctypes.addressof(state)
        if is_gather:
            to = out.data_ptr() if rank == 0 else 0
            seen.add(library.gather_first(address, x.data_ptr(), to, NUM_ROWS, row_bytes))
        else:
            seen.add(library.all_reduce(address, x.data_ptr(), out.data_ptr(), count, 0))
    assert seen == {DONE, NOT_YET, BROKEN}, seen
    assert not area.closed


def test_ranks_that_share_a_process_get_the_same_sums(library: Library) -> None:
    """Threads instead of processes: ThreadSanitizer sees all sides of the exchange."""
    area = mmap.mmap(-1, REGION_BYTES)
    region = ctypes.addressof(ctypes.c_char.from_buffer(area))
    count = SEGMENT_BYTES // 4 * 3 + 5
    parts = torch.arange(float(SIZE * count)).view(SIZE, count)
    sums = torch.zeros(SIZE, 20, count)

    def call(rank: int) -> None:
        state = ExchangeState(region, rank, SIZE, SEGMENT_BYTES, 10)
        for turn in range(20):
            x, out = parts[rank] + turn, sums[rank, turn]
            address = ctypes.addressof(state), x.data_ptr(), out.data_ptr()
            while (result := library.all_reduce(*address, count, 0)) == NOT_YET:
                pass
            assert result == DONE

    with ThreadPoolExecutor(SIZE) as ranks:
        list(ranks.map(call, range(SIZE)))
    for turn in range(20):
        assert (sums[:, turn] == (parts[0] + parts[1] + parts[2] + 3 * turn)).all()


def lie(region: int, start: int, call: int, draw: random.Random) -> None:
    """Fill the headers with what is often possible in the next segment, and else with anything."""
    ctypes.memmove(region, draw.randbytes(HEADER_BYTES * SIZE), HEADER_BYTES * SIZE)
    for rank in range(SIZE):
        words = (ctypes.c_uint64 * 3).from_address(region + HEADER_BYTES * rank)
        near = start + draw.choice([0, 1, 1, 1, 2])
        words[0] = draw.choice([near, near, near, draw.getrandbits(64)])
        for place in (1, 2):
            words[place] = draw.choice([call, call, call, draw.getrandbits(64)])


def fenced(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return the address of memory that ends where no access is allowed, and begins so."""
    page = mmap.PAGESIZE
    assert num_bytes % HEADER_BYTES == 0, "headers would not be aligned"
    inner = -(-num_bytes // page) * page
    area = mmap.mmap(-1, inner + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address, page, 0) == 0
    assert protect(address + page + inner, page, 0) == 0
    return area, address + page + inner - num_bytes
