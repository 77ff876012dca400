"""Places in a real group of processes for ranks that are threads of one process."""

import socket
from concurrent.futures import ThreadPoolExecutor

from worker.distributed.parallel import Communicator, join_group


def free_address() -> str:
    """Return an address where a store can be opened."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def join_in_threads(size: int, timeout: float) -> list[Communicator]:
    """Return the places of a group that has met over TCP, in rank order."""
    address = free_address()
    with ThreadPoolExecutor(size) as threads:
        joining = [
            threads.submit(join_group, address, rank, size, "cpu", timeout) for rank in range(size)
        ]
        return [place.result() for place in joining]
