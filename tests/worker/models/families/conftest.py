"""The tiny model of a family's class of tests, and engines that serve it."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.worker.models.families.battery import Engine, Made
from tests.worker.peft_adapters import make_adapter_dir


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is not quick of a family."""
    for item in items:
        is_quick = getattr(getattr(item, "cls", None), "is_quick", True)
        if not is_quick and "test_logits" not in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="class")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The model that the class builds, with random weights, and an adapter that changes it."""
    assert request.cls is not None, "a family's tests are a class"
    torch.manual_seed(7)
    model = request.cls.build().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            mean, deviation = request.cls.distribution(key)
            parameter.normal_(mean, deviation)
    path, adapter = (tmp_path_factory.mktemp(name) for name in ("model", "adapter"))
    model.save_pretrained(path)
    make_adapter_dir(model, request.cls.adapter, adapter)
    return Made(model, path, adapter)


@pytest.fixture(scope="class")
def start_engine(tiny: Made) -> Iterator[Callable[..., Engine]]:
    """Return a function that starts an engine; all are stopped at the end."""
    engines: list[Engine] = []

    def start(tp: int, **options: int) -> Engine:
        engines.append(Engine(tiny, tp, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
