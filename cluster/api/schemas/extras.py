"""What bodies hold beside their fields, for clients that cannot be changed: `lenient_parameters`.

Owns which parameters may be ignored instead of refused, and that each is logged once. Whether one
asks for anything at all is known to `schemas.requests`.
"""

import logging

MAX_LOGGED = 256  # names: whoever may call could fill a log with others

# Whoever asks for one of these asks for an adapter: the base model must not answer in its place.
NEVER_IGNORED = frozenset({"adapter", "adapter_id", "lora_id", "lora_name", "lora_path"})

_logger = logging.getLogger(__name__)


class ExtraParameters:
    """Decides what becomes of parameters that are unknown or not supported."""

    def __init__(self, is_lenient: bool = False) -> None:
        self._is_lenient = is_lenient
        self._logged: set[str] = set()

    def ignores(self, name: str) -> bool:
        """Return whether a parameter is ignored; the first time that is logged."""
        if not self._is_lenient or name.rpartition(".")[2] in NEVER_IGNORED:
            return False
        name = name[:100]
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            _logger.warning("the parameter %r is ignored: lenient_parameters is on", name)
        return True


STRICT = ExtraParameters()
