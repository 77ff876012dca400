"""worker.runners.device_arrays: what the host may write, and when."""

import pytest
import torch

from worker.runners.device_arrays import ALIGNMENT, DeviceArrays

SHAPES = {"a": (torch.int32, (3,)), "b": (torch.int64, (2, 2)), "none": (torch.int32, (0, 4))}


def arrays() -> DeviceArrays:
    return DeviceArrays(SHAPES, torch.device("cpu"), pins_memory=False)


def test_all_arrays_arrive_in_their_places() -> None:
    sent = arrays()
    host = sent.writable()
    host["a"][:] = [1, 2, 3]
    host["b"][:] = [[4, 5], [6, 7]]
    sent.send()
    assert sent.device["a"].tolist() == [1, 2, 3]
    assert sent.device["b"].tolist() == [[4, 5], [6, 7]]
    assert sent.device["none"].shape == (0, 4)
    assert all(x.storage_offset() * x.itemsize % ALIGNMENT == 0 for x in sent.device.values())


def test_the_host_writes_again_only_when_the_last_copy_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            assert device == torch.device("cpu")

        def record(self) -> None:
            done.append("copy")

        def synchronize(self) -> None:
            done.append("wait")

    monkeypatch.setattr("worker.runners.device_arrays.DeviceEvent", Event)
    sent = arrays()
    for _ in range(2):
        sent.writable()
        done.append("write")
        sent.send()
    assert done == ["wait", "write", "copy", "wait", "write", "copy"]
