"""docs/flags.md, the page of vLLM's and SGLang's flags: `python -m deploy.cli.flags_page`."""

from collections.abc import Iterable
from pathlib import Path

from deploy.cli.aliases import refusal
from deploy.flag_aliases import ALIASES, SAME, Alias, flag_of

FILE = Path(__file__).parents[2] / "docs" / "flags.md"
INTRODUCTION = """# Flags of vLLM and SGLang

Made by `python -m deploy.cli.flags_page` from `deploy/flag_aliases.py`: do not edit.

`topwork serve` and `topwork check` take the model as vLLM does, `topwork serve MODEL`, and the
flags below by the names that vLLM and SGLang give them, with `-` or `_`. What is not here is no
flag: the mistake names the nearest one. These names are for the command line; files of `--config`
have our keys, and a key by another name is answered with ours. Two names that say different things
of one key are refused.
"""
FORMS = {
    "as ours": "",
    "GiB": "a number of GiB",
    "vLLM bytes": "bytes; `k`, `m`, `g` are powers of 1,000, `K`, `M`, `G` of 1,024, as there",
    "vLLM adapters": (
        '`NAME=PATH` or `{"name": ..., "path": ..., "base_model_name": ...}`, one or more; '
        "adds to `--adapter`"
    ),
    "SGLang adapters": (
        '`PATH`, `NAME=PATH` or `{"lora_name": ..., "lora_path": ...}`, one or more; adds to '
        "`--adapter`"
    ),
}
API_KEY = """## Why `--api-key` is refused

Everyone on a machine can read its command lines while they run, and the shell's history keeps them.
Nor would a key alone say what its bearer may do: vLLM's opens everything, ours have
[rights](security.md#keys). This makes a file with one key for everything that only its owner may
read; then give `--api-key-file keys.yaml`:

```
(umask 077; echo "[{key: $KEY, tenant: me, adapters: '*', admin: true}]" > keys.yaml)
```
"""
REFUSED = """## Refused

The message says why, and what to use. A value that asks for nothing is taken all the same.

"""
HOST = "Without `--host` a server is bound to this machine only; `--port` is 8000 unless set.\n"


def page() -> str:
    """Return the whole page."""
    same = [(f"`{flag_of(key)}`", servers) for key, servers in SAME.items()]
    taken = [one for one in ALIASES if one.key is not None and not one.is_refused]
    needless = [one for one in ALIASES if one.key is None and not one.is_refused]
    refused = [one for one in ALIASES if one.is_refused]
    return "\n".join(
        [
            INTRODUCTION,
            "## The same name\n\n" + _table(("flag", "of"), same),
            HOST,
            "## Another name\n\n"
            + _table(("theirs", "of", "ours", "its value"), map(_taken, taken)),
            "## Nothing is needed\n\n"
            + _table(
                ("theirs", "of", "why"), ((f"`{a.name}`", a.servers, a.why) for a in needless)
            ),
            REFUSED + _table(("theirs", "of", "why", "taken all the same"), map(_refused, refused)),
            API_KEY,
        ]
    )


def _taken(alias: Alias) -> tuple[str, ...]:
    assert alias.key is not None, f"{alias.name} sets nothing"
    theirs = f"`{alias.name}`" + (f", `{alias.negation}`" if alias.negation else "")
    ours = flag_of(alias.key)
    if alias.sets is not None:
        ours = ours if alias.sets else f"--no-{ours[2:]}"
    return theirs, alias.servers, f"`{ours}`", FORMS[alias.form] or alias.why


def _refused(alias: Alias) -> tuple[str, ...]:
    why = refusal(alias).removeprefix(f"{alias.name}: ")
    if alias.key is not None:
        why = why.replace(flag_of(alias.key), f"`{flag_of(alias.key)}`")
    neutral = ", ".join(f"`{value}`" for value in alias.neutral)
    return f"`{alias.name}`", alias.servers, why, neutral


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    FILE.write_text(page())
