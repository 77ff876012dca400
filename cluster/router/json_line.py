"""JSON as one line of a log: printable ASCII alone, whatever a caller has sent.

So nothing in it ends the line, forges another one, or tells a terminal anything.
"""

import json
from typing import Any


def json_line(fields: dict[str, Any]) -> str:
    """Return fields as a line, without its end."""
    text = json.dumps(fields, ensure_ascii=True, separators=(",", ":"))
    return text.replace("\x7f", "\\u007f")  # the one that JSON leaves
