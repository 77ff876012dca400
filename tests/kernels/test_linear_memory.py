"""A server sees every number of rows; the matrix library must not keep something for each."""

import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from kernels.linear import linear, prepare_linear
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
weights = [prepare_linear(torch.randn(n, 576).bfloat16()) for n in (960, 576, 1536)]
def use(rows):
    for weight in weights:
        linear(torch.randn(rows, 576).bfloat16(), weight)
for rows in (512, 33, 64, 128, 256, 32, 16, 8, 4, 2):
    use(rows)
before = resident()
for rows in range(1, 400):
    use(rows)
print(resident() - before)
"""


def test_memory_does_not_grow_with_the_numbers_of_rows_seen() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=root, check=True
    )
    assert int(done.stdout) < 16 * 2**20  # without blocks: several hundred MB
