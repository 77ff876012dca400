"""What a file of worker.models.families says: `FAMILY` is all that anyone looks for in it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile

File = TypeVar("File", bound=ConfigFile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[File]):
    """One family of models, as transformers names its parts."""

    name: str  # that of its file, as `model_type` has it
    causal_lm: str  # of `architectures`
    classifier: str | None = None  # likewise, of models with a head called score; None: no such
    # Of models with towers of other kinds, whose language model this is; None: no such.
    multimodal: str | None = None
    file: type[File]  # the keys of `config.json` that it knows
    # Makes the shape of a model out of its file. Raises ValueError, naming the key at fault.
    read: Callable[[File], ModelConfig]

    def knows(self, key: str) -> bool:
        """Tell whether a key of `config.json` means something to this family."""
        return key in self.file.__struct_fields__
