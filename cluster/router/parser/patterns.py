"""Patterns of JSON schemas, as llguidance must get them.

A schema's patterns are ECMA 262's, llguidance's are those of Rust's regex crate. Where both write
something in the same way and mean something else, it is written anew or refused; where Python means
something else again, what both mean is what is allowed.
"""

_LINE_ENDS = r"\n\r\u2028\u2029"
_SPACES = r"\t-\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_MAYBE_SPACES = rf"{_SPACES}\x1c-\x1f\u0085\ufeff"  # to one of the two
_UNKNOWN = frozenset("aegijlmoqyCEFGHIJKLMNOQRTUVXY")  # of the letters


def pattern_of(pattern: str) -> str:
    """Return a pattern of ECMA 262 in the syntax of Rust's regex crate.

    Raises:
        ValueError: if it has parts whose meaning is not the same.
    """
    parts: list[str] = []
    place = 0
    negated: bool | None = None  # not in a class
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            parts.append(_escape(pattern[place + 1 : place + 2], negated))
            place += 2
            continue
        if negated is None:
            if char == ".":
                char = f"[^{_LINE_ENDS}]"
            elif char == "[":
                negated = pattern[place + 1 : place + 2] == "^"
                first = place + 1 + negated
                if pattern[first : first + 1] == "]":
                    raise ValueError("an empty class cannot be followed")
        elif char == "]":
            negated = None
        elif char == "[":
            char = r"\["
        elif char in "&~-" and pattern[place + 1 : place + 2] == char:
            if char == "-":
                raise ValueError(r"`--` in a class cannot be followed: write `\-`")
            char, place = f"\\{char}\\{char}", place + 1
        parts.append(char)
        place += 1
    return "".join(parts)


def _escape(char: str, negated: bool | None) -> str:
    """Return an escape; `negated` says of what class it is a part, None of none."""
    if not char:
        raise ValueError("it ends with a backslash")
    if char in "<>":  # which Rust takes for the ends of words
        return char
    if char in _UNKNOWN:
        raise ValueError(f"the escape \\{char} is none of ECMA 262")
    if char not in "sS":
        return f"\\{char}"
    # What is left out of a class that is negated is let in.
    spaces = _MAYBE_SPACES if (char == "S") != bool(negated) else _SPACES
    if negated is not None and char == "s":
        return spaces
    return f"[{'^' if char == 'S' else ''}{spaces}]"
