"""An engine of any commit that runs a step when it is asked to, for `tests.bench.steps`.

Run as a file by the commit's own Python, in its own tree. A line in, a line out: "adapters" or
"base" starts requests of that kind and is answered by how many, "step" runs one step and is
answered by whether there was one and the seconds that it took.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from deploy.bench.engine_target import EngineTarget
from deploy.bench.workload import Workload

CLIENTS, INPUT, OUTPUT = 8, 128, 256


def main() -> None:
    """Serve the parent until it closes the pipe."""
    model, threads, *folders = sys.argv[1:]
    adapters = {Path(folder).name: folder for folder in folders}
    engine: Any = EngineTarget(Path(model), "base", adapters, 1, "bfloat16", int(threads))
    number = 0
    for line in sys.stdin:
        if line.strip() != "step":
            models = tuple(adapters) if line.strip() == "adapters" else ("base",)
            load = Workload(
                name=line.strip(),
                models=models,
                concurrency=CLIENTS,
                num_requests=CLIENTS,
                input_len=INPUT,
                output_len=OUTPUT,
            )
            number += 1
            for ask in load.asks(number):
                engine._engine.submit(engine._request(ask))
            print(json.dumps(CLIENTS), flush=True)
            continue
        begin = time.perf_counter()
        is_running = engine._engine.step()
        print(json.dumps([is_running, time.perf_counter() - begin]), flush=True)


if __name__ == "__main__":
    main()
