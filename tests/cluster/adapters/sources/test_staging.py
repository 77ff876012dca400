"""The staging folder on a disk that is full."""

import subprocess
import sys
from pathlib import Path

import pytest

# A file may not grow beyond 64 KiB: the kernel refuses like a full disk, at writes and at the end.
ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from cluster.adapters.sources.staging import StagingFolder
from cluster.errors import Unavailable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = StagingFolder(Path(sys.argv[1]), 1 << 30)
folder.open()
incoming = folder.incoming(2**30)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
incoming.write(bytes(65536))
try:
    for _ in range(100):
        incoming.write(bytes(int(sys.argv[2])))
    incoming.head(8) if sys.argv[3] == "head" else incoming.seal(b"{}", None)
except Unavailable as error:
    print(error.message)
incoming.discard()
"""


@pytest.mark.parametrize("num_bytes", [1, 5000, 70000])
@pytest.mark.parametrize("end", ["head", "seal"])
def test_what_a_full_disk_does_not_take_is_unavailable_and_leaves_nothing_behind(
    tmp_path: Path, num_bytes: int, end: str
) -> None:
    command = [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path), str(num_bytes), end]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "the staging folder cannot be written" in ran.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]
