"""What goes on in a thread of its own while a block is run."""

import threading
from abc import ABC, abstractmethod
from typing import Self


class InBackground(ABC):
    """A context: `run` has begun on entry, and has ended when it is left."""

    def __init__(self) -> None:
        self.stopping = threading.Event()  # that `run` must heed
        self._thread = threading.Thread(target=self.run, name=type(self).__name__)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._thread.join()

    @abstractmethod
    def run(self) -> None:
        """Go on until `stopping` is set."""
