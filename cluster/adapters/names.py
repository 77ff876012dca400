"""What may name an adapter. Knows nothing of which names are taken."""

import re

from cluster.adapters.peft.strict_json import shown
from cluster.errors import InvalidRequest
from cluster.request import BASE

# What hubs and fine-tuning tools make; no space or control character, no dot file, no "../".
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:@+/-]{0,126}[A-Za-z0-9])?")


def check_form(name: str, base_name: str) -> None:
    """Refuse what no adapter can be called where the base model is called `base_name`.

    Raises:
        InvalidRequest: if the name is malformed or the base model's.
    """
    if NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{shown(name)} cannot name an adapter: it takes 1 to 128 letters, digits and "
            "._:@+/- with a letter or digit at both ends",
            "lora_name",
        )
    if name in (base_name, BASE):
        raise InvalidRequest(f"{shown(name)} is the name of the base model", "lora_name")
