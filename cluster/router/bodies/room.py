"""How many bytes of large bodies a router holds at a time, over all calls."""

from cluster.errors import Overloaded


class BodyRoom:
    """Bytes of bodies that are being read and made into requests.

    A body is asked for by its announced size before a byte of it is read, and takes what has come
    of it: who announces much and sends nothing keeps nobody out.
    """

    def __init__(self, size: int, retry_after: int) -> None:
        self.size = size  # bytes
        self.num_held = 0  # bytes
        self._retry_after = retry_after

    def check(self, num_bytes: int) -> None:
        """Raise Overloaded unless so many bytes more would fit now."""
        if self.num_held + num_bytes > self.size:
            raise Overloaded(
                f"{self.num_held} bytes of large bodies are being read, and {num_bytes} more would "
                f"be over the limit of {self.size}",
                retry_after=self._retry_after,
            )

    def take(self, num_bytes: int) -> None:
        """Hold so many bytes more; raises as `check`."""
        self.check(num_bytes)
        self.num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Hold so many bytes less."""
        assert num_bytes <= self.num_held, "only what was taken"
        self.num_held -= num_bytes
