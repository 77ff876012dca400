"""The tensors of a model in a GGUF file, by the names of its family. Free of torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from worker.model_config import ModelConfig
from worker.weights.gguf.architectures import ROPE_TENSORS, Change, source_of
from worker.weights.gguf.config import architecture_of
from worker.weights.gguf.container import Shape
from worker.weights.gguf.files import Gguf, Place
from worker.weights.safetensors_header import shown
from worker.weights.tensor_names import as_stored, expected_tensors

_LISTED = 3  # tensors that a message names


@dataclass(frozen=True, slots=True)
class Stored:
    """How one of the family's tensors lies in a file."""

    name: str  # of the file's
    place: Place
    expert: int | None  # whose part of it; None: all of it
    change: Change

    @property
    def shape(self) -> Shape:
        """That of the family's tensor."""
        return self.place.info.shape if self.expert is None else self.place.info.shape[1:]


class TensorIndex:
    """Finds the tensors of one model."""

    def __init__(self, gguf: Gguf) -> None:
        """Take the tensors of a model.

        Raises:
            ValueError: if it is of an architecture that is not read.
        """
        self._tensors = gguf.tensors
        self._architecture = architecture_of(gguf)

    def find(self, name: str, shape: Shape) -> Stored:
        """Return where one of the family's tensors lies that must have some shape.

        Raises:
            ValueError: if there is none, or it has another shape or a type that it cannot be of.
        """
        source = source_of(name, self._architecture)
        place = None if source is None else self._tensors.get(source.name)
        if source is None or place is None:
            called = "" if source is None else f", which is {source.name} in such a file"
            raise ValueError(f"the checkpoint has no tensor {name}{called}")
        info = place.info
        here = f"{place.file.name}: tensor {source.name}"
        if source.expert is not None and not source.expert < info.shape[0]:
            raise ValueError(f"{here} has shape {list(info.shape)}, and no part {source.expert}")
        stored = Stored(source.name, place, source.expert, source.change)
        if stored.shape != shape:
            of = f" of which {name} is a part" if source.expert is not None else ""
            raise ValueError(f"{here} has shape {list(info.shape)}, not{of} {list(shape)}")
        if len(shape) == 1 and not info.type.is_plain:
            raise ValueError(f"{here} is of type {info.type.name}: of one row there must be floats")
        return stored


def check_tensors(gguf: Gguf, config: ModelConfig) -> None:
    """Refuse a file that has not just the tensors of a model, each as it must be.

    Raises:
        ValueError: naming the tensors at fault.
    """
    index = TensorIndex(gguf)
    config = as_stored(config, ())  # an expert's tensors are found by its own names
    used = set()
    # Metadata may claim as many layers as it likes: one by one, until one is missing.
    for name, shape in expected_tensors(config):
        stored = index.find(name, shape)
        if stored.expert is not None and config.experts is not None:
            experts = stored.place.info.shape[0]
            if experts != config.experts.num_experts:
                raise ValueError(
                    f"{stored.place.file.name}: tensor {stored.name} has {experts} experts, not "
                    f"{config.experts.num_experts}"
                )
        used.add(stored.name)
    unknown = [name for name in gguf.tensors if name not in used and name not in ROPE_TENSORS]
    if unknown:
        raise ValueError(f"{gguf.path.name} has unknown tensors: {_listed(unknown)}")


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    text = ", ".join(map(shown, islice(all_names, _LISTED)))
    more = len(all_names) - _LISTED
    return f"{text} and {more} more" if more > 0 else text
