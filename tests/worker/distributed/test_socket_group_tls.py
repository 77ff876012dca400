"""Ranks on CPUs of several hosts sum behind TLS, and join nobody who has no certificate."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.certificates import host_certificate, use_tls
from tests.worker.group import free_address
from worker.distributed.communicator import Communicator, sum_in_pairs
from worker.distributed.parallel import join_group
from worker.distributed.socket_group import SocketGroup
from worker.errors import GroupBroken
from worker.transport.channel import listen
from worker.transport.tls_connection import TlsConnection


def on_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks have no memory in common."""
    monkeypatch.setattr("worker.distributed.shared_group.host_identity", lambda: "")


def join(size: int, timeout: float = 30.0) -> list[Communicator]:
    address = free_address()
    with ThreadPoolExecutor(size) as threads:
        joining = [
            threads.submit(join_group, address, rank, size, "cpu", timeout, b"secret")
            for rank in range(size)
        ]
        return [rank.result() for rank in joining]


def test_three_ranks_sum_and_gather_behind_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tls(monkeypatch, host_certificate(tmp_path / "ca"))
    on_hosts_of_their_own(monkeypatch)
    ranks = join(3, timeout=10.0)  # the second rank is waited for so long at the end
    for rank in ranks:
        assert isinstance(rank, SocketGroup)
        assert all(isinstance(peer, TlsConnection) for peer in rank._peers.values())
    for count in (1, 576, 100_003):
        parts = [torch.randn(count) * 10.0**rank for rank in range(3)]
        with ThreadPoolExecutor(3) as threads:
            sums = list(threads.map(lambda rank, x: rank.all_reduce(x), ranks, parts))
        assert all(torch.equal(total, sum_in_pairs(parts)) for total in sums)
    columns = torch.arange(6.0).view(2, 3)
    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(lambda rank: rank.gather_first(columns, [3, 3, 3]), ranks)
    assert first is not None and torch.equal(first, torch.cat([columns] * 3, dim=1))
    assert others == [None, None]
    assert isinstance(ranks[0], SocketGroup)
    assert ranks[0].lost_ranks(0.0) == []  # nothing of TLS is left to be read
    ranks[2].close()
    with pytest.raises(GroupBroken):
        ranks[0].all_reduce(torch.ones(3))
    for rank in ranks[:2]:
        rank.close()


def test_a_rank_whose_host_is_of_another_cluster_does_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tls(monkeypatch, host_certificate(tmp_path / "ca"))
    with listen("127.0.0.1") as other_cluster, ThreadPoolExecutor(1) as threads:
        address = other_cluster.getsockname()
        joining = threads.submit(SocketGroup, address, 1, 2, 30.0, b"secret")
        accepted, _ = other_cluster.accept()
        with accepted:
            accepted.sendall(bytes(64))  # who listens there cannot show a certificate
        with pytest.raises(GroupBroken, match="could not join"):
            joining.result()
