"""A process of its own that keeps one rank as busy as it can be, and says what it took.

Run as `python -m tests.deploy.busy_rank CONFIG_AS_JSON ADAPTER_DIR...`; prints JSON.
"""

import json
import sys
from pathlib import Path

from cluster.request import BASE, Request
from deploy.config import ServeConfig
from deploy.engine_config import check_model
from deploy.local_engine import LocalEngine
from deploy.serving.settings import scheduler_settings
from worker.protocol import SamplingParams

PROMPT = 250
ANSWER = 6


def own_bytes() -> int:
    """Return what nobody else could use: mapped files are left out, which give way."""
    lines = Path("/proc/self/status").read_text().splitlines()
    by_name = dict(line.split(":", 1) for line in lines)
    return sum(int(by_name[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def main() -> None:
    config = ServeConfig(**json.loads(sys.argv[1]))
    settings = scheduler_settings(check_model(config))
    before = own_bytes()
    engine = LocalEngine(settings.rank, settings.engine.ranks.scheduler, config.max_lora_rank)
    adapters = [engine.add_adapter(Path(directory)) for directory in sys.argv[2:]]

    def ask(adapter: str, seed: int) -> Request:
        prompt = tuple((701 * seed + 13 * i) % 40000 + 1000 for i in range(PROMPT))
        drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=seed)
        return Request(str(seed), adapter, prompt, drawn, ANSWER)

    for first, models in ((0, [BASE]), (1000, adapters)):
        asked = [ask(models[i % len(models)], first + i) for i in range(config.max_num_seqs)]
        assert all(answer.error is None for answer in engine.generate(asked))
    stats = engine.scheduler.stats()
    print(
        json.dumps(
            {
                "took": own_bytes() - before,
                "process": before,
                "evicted_pages": stats.counters.evicted_pages,
            }
        )
    )


if __name__ == "__main__":
    main()
