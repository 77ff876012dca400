"""vLLM's and SGLang's names of flags: what each sets, and why the others are refused."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.cli.flags_page import FILE, page
from deploy.config import ConfigError, ServeConfig, load_config
from deploy.flag_aliases import ALIASES, SAME, WORDS, Alias, flag_of
from tests.deploy.cli.command_line import read, refused, run

TAKEN = [one for one in ALIASES if one.key is not None and not one.is_refused]
NEEDLESS = [one for one in ALIASES if one.key is None and not one.is_refused]
REFUSED = [one for one in ALIASES if one.is_refused]
by_name = pytest.mark.parametrize


def ids(alias: Alias) -> str:
    return alias.name


def test_no_name_is_in_the_table_twice_or_one_of_ours() -> None:
    names = [name for one in ALIASES for name in (one.name, one.negation) if name]
    ours = {flag_of(key) for key in ServeConfig.model_fields}
    assert len(set(names)) == len(names)
    assert not {*names, *(f"--{name.lstrip('-')}" for name in names)} & ours - {"--tp"}


def test_what_the_table_names_are_keys() -> None:
    keys = set(ServeConfig.model_fields)
    assert {one.key for one in ALIASES if one.key is not None} <= keys
    assert set(SAME) <= keys and {key for key, _ in WORDS} <= keys


def test_the_page_of_flags_is_in_step() -> None:
    """If not: `python -m deploy.cli.flags_page`."""
    assert FILE.read_text() == page()


PLAIN = [one for one in TAKEN if one.sets is None and one.form == "as ours" and one.key != "model"]


NUMBERS = [one for one in PLAIN if not (one.key or "").startswith(("tls_", "quantization"))]


def test_the_two_files_of_tls_have_other_names() -> None:
    ours = read("m", "--tls-cert", "c.pem", "--tls-key", "k.pem").config
    assert (ours.tls_cert, ours.tls_key) == (Path("c.pem"), Path("k.pem"))
    assert read("m", "--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem").config == ours


@by_name("alias", NUMBERS, ids=ids)
def test_another_name_sets_what_ours_sets(alias: Alias) -> None:
    assert alias.key is not None
    ours = read("m", flag_of(alias.key), "7").config
    assert getattr(ours, alias.key) == 7
    assert read("m", alias.name, "7").config == ours
    assert read("m", f"{alias.name}=7").config == ours
    assert read("m", flag_of(alias.key), "7", alias.name, "7").config == ours


@by_name("spelled", ["--tensor_parallel_size", "--tensor_parallel-size"])
def test_underscores_are_dashes(spelled: str) -> None:
    assert read("m", spelled, "3").config.tp == 3
    assert read("m", f"{spelled}=3", "--max_model_len", "8").config.max_model_len == 8


@by_name("alias", PLAIN, ids=ids)
def test_an_alias_and_ours_may_not_contradict_each_other(alias: Alias) -> None:
    assert alias.key is not None
    ours = flag_of(alias.key)
    said = refused("m", alias.name, "2", ours, "3")
    assert said == f"{ours} '3' and {alias.name} '2' contradict each other: give one"


def test_two_aliases_may_not_contradict_each_other_either() -> None:
    said = refused("m", "-tp", "2", "--tp-size", "4")
    assert said == "-tp '2' and --tp-size '4' contradict each other: give one"
    assert read("m", "-tp", "2", "--tp-size", "2").config.tp == 2


def test_an_alias_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "tp": 2}))
    assert read("--config", str(file), "-tp", "4").config.tp == 4


def test_the_model_is_an_argument_a_flag_or_an_alias() -> None:
    for arguments in (("m",), ("--model", "m"), ("--model-path", "m"), ("m", "--model=m")):
        assert read(*arguments).config.model == "m"
    assert read("--tp", "2", "m").config == read("m", "--tp", "2").config
    said = refused("m", "--model", "n")
    assert said == "--model 'n' and MODEL 'm' contradict each other: give one"
    assert refused() == "model: is missing, and has no default"


@by_name(
    ("arguments", "is_on"),
    [
        ((), True),
        (("--enable-prefix-caching",), True),
        (("--no-enable-prefix-caching",), False),
        (("--disable-radix-cache",), False),
        (("--no-prefix-cache", "--disable-radix-cache"), False),
    ],
)
def test_the_prefix_cache_is_switched_by_all_its_names(
    arguments: tuple[str, ...], is_on: bool
) -> None:
    assert read("m", *arguments).config.prefix_cache is is_on


@by_name(
    ("one", "other"),
    [
        ("--disable-radix-cache", "--enable-prefix-caching"),
        ("--no-prefix-cache", "--enable-prefix-caching"),
        ("--prefix-cache", "--no-enable-prefix-caching"),
    ],
)
def test_switches_may_not_contradict_each_other(one: str, other: str) -> None:
    said = refused("m", other, one)
    assert {one, other} <= set(said.split()) and "contradict each other" in said


def test_values_in_others_units_and_words_are_read_as_they_mean_them() -> None:
    assert read("m", "--swap-space", "1.5").config.kv_host_memory == 3 * 2**29
    for value, count in (("25g", 25 * 10**9), ("25G", 25 * 2**30), ("77", 77), ("3k", 3000)):
        assert read("m", "--kv-cache-memory-bytes", value).config.kv_cache_memory == count
    assert read("m", "--dtype", "float").config.dtype == "float32"
    assert read("m", "--log-level", "info").config.log_level == "INFO"
    automatic = read("m", "--dtype", "auto")
    assert automatic.config.dtype == "bfloat16"
    assert automatic.said == "note --dtype auto: computed in bfloat16, unless told otherwise\n"
    assert "dtype: 'half' will not do" in refused("m", "--dtype", "half")


def test_a_format_of_checkpoints_is_no_way_to_compute_and_the_refusal_says_what_is() -> None:
    assert read("m", "-q", "int8").config.quantization == "int8"
    for value in ("awq", "fp8", "compressed-tensors"):
        said = refused("m", "--quantization", value)
        assert said.startswith(f"quantization: {value} is a way in which a checkpoint is quantized")
        assert said.endswith("give int8 or int4")
    said = refused("m", "--quantization", "int3")
    assert said == "quantization: 'int3' will not do: input should be 'int8' or 'int4'"


def test_adapters_have_the_type_of_the_model_or_int8_and_no_other_of_vllms() -> None:
    assert read("m", "--lora-dtype", "auto").config == read("m").config
    assert read("m", "--lora-dtype", "int8").config.lora_dtype == "int8"
    said = refused("m", "--lora-dtype", "float16")
    assert said == "lora_dtype: 'float16' will not do: input should be 'auto' or 'int8'"


@by_name("alias", NEEDLESS, ids=ids)
def test_what_needs_nothing_is_taken_and_says_so(alias: Alias) -> None:
    got = read("m", alias.name, *(["all"] if alias.takes_value else []))
    assert got.config == read("m").config
    assert got.said == f"note {alias.name}: nothing is needed for it: {alias.why}\n"


@by_name("alias", REFUSED, ids=ids)
def test_what_cannot_be_had_is_refused_with_the_reason_and_without_the_value(alias: Alias) -> None:
    said = refused("m", alias.name, *(["a-secret"] if alias.takes_value else []))
    assert said.startswith(f"{alias.name}: {alias.why}")
    assert alias.key is None or said.endswith(f"; use {flag_of(alias.key)}")
    assert "secret" not in said
    for value in alias.neutral:
        assert read("m", alias.name, value).config == read("m").config


def test_each_refused_flag_has_a_line() -> None:
    said = refused("m", "--seed", "0", "--enforce-eager", "--load-format", "gguf")
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "--seed",
        "--load-format",
        "--enforce-eager",
    ]


VLLM_JSON = json.dumps({"name": "c", "path": "/c", "base_model_name": "m"})
SGLANG_JSON = json.dumps({"lora_name": "c", "lora_path": "/c", "pinned": False})


@by_name(
    ("arguments", "adapters"),
    [
        (["--lora-modules", "a=/a"], {"a": "/a"}),
        (["--lora-modules", "a=/a", "b=/b", VLLM_JSON], {"a": "/a", "b": "/b", "c": "/c"}),
        (["--lora-modules=a=/a", "--lora-modules", "b=/b"], {"a": "/a", "b": "/b"}),
        (["--lora-modules", "a=/a", "--adapter", "b=/b"], {"a": "/a", "b": "/b"}),
        (["--lora-modules", "a=/a", "--adapter", "a=/a"], {"a": "/a"}),
        (["--lora-modules", "a=/x=y,z"], {"a": "/x=y,z"}),
        (["--lora-paths", "a=/a", SGLANG_JSON], {"a": "/a", "c": "/c"}),
        (["--lora-paths", "some/b"], {"some/b": "some/b"}),
        (["--lora-modules", '{"name": "a", "path": "/a", "base_model_name": null}'], {"a": "/a"}),
    ],
)
def test_adapters_are_taken_in_all_their_forms(
    arguments: list[str], adapters: dict[str, str]
) -> None:
    assert read("m", *arguments).config.adapters() == adapters
    assert read("m", *arguments, "--port", "8001").config.adapters() == adapters


@by_name(
    ("flag", "item", "fault"),
    [
        ("--lora-modules", "nameless", "'nameless' is neither NAME=PATH nor JSON"),
        ("--lora-modules", "{", "'{' is no JSON object"),
        ("--lora-modules", "{" * 5000, "is no JSON object"),
        ("--lora-modules", '{"name": "a"}', "needs name and path, both as text"),
        ("--lora-modules", '{"name": "a", "path": 3}', "needs name and path, both as text"),
        ("--lora-modules", '{"name": "a=b", "path": "/c"}', "'a=b' cannot name an adapter"),
        ("--lora-modules", '{"name": "a", "path": "/c", "rank": 3}', "rank is not supported"),
        (
            "--lora-modules",
            '{"name": "a", "path": "/c", "base_model_name": "llama"}',
            "a is for the base model 'llama', and m is served",
        ),
        ("--lora-paths", '{"lora_name": "a"}', "needs lora_name and lora_path, both as text"),
        (
            "--lora-paths",
            '{"lora_name": "a", "lora_path": "/a", "pinned": true}',
            "a cannot be pinned at the start; `topwork adapters pin`",
        ),
    ],
)
def test_an_adapter_that_cannot_be_read_is_refused_by_its_flag(
    flag: str, item: str, fault: str
) -> None:
    said = refused("m", flag, item)
    assert said.startswith(f"{flag}: ") and fault in said and len(said) < 400


def test_an_adapter_of_the_served_name_or_of_the_model_is_of_the_base_model() -> None:
    for base in ("org/llama", "served"):
        item = json.dumps({"name": "a", "path": "/a", "base_model_name": base})
        arguments = ("org/llama", "--served-model-name", "served", "--lora-modules", item)
        assert read(*arguments).config.adapters() == {"a": "/a"}


def test_an_adapter_that_two_flags_name_differently_is_refused() -> None:
    assert "'a' is given twice" in refused("m", "--lora-modules", "a=/a", "--adapter", "a=/b")


KEYS = [one for one in ALIASES if one.name.startswith("--")]


@by_name("alias", KEYS, ids=ids)
def test_a_key_of_a_file_that_is_called_so_is_answered_with_ours_or_the_reason(
    alias: Alias,
) -> None:
    key = alias.name[2:].replace("-", "_")
    with pytest.raises(ConfigError) as told:
        load_config(None, {"model": "m", key: 1})
    hint = f"; did you mean {alias.key}?" if alias.key is not None else f": {alias.why}"
    assert str(told.value) == f"{key}: there is no such key{hint}"


@by_name(
    ("flag", "meant"),
    [
        ("--tensor-paralel", "--tensor-parallel-size"),
        ("--lora-module", "--lora-modules"),
        ("--max-lora", "--max-loras"),
        ("--no-prefix-caching", "--no-prefix-cache"),
        ("--served_model_names", "--served-model-name"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest_that_can_be_had(
    flag: str, meant: str
) -> None:
    for arguments in ((flag, "3"), (f"{flag}=3",)):
        said = refused("m", *arguments)
        assert said == f"{flag.replace('_', '-')}: there is no such flag; did you mean {meant}?"


def test_a_flag_like_no_other_is_answered_with_where_all_are() -> None:
    assert refused("m", "--zzzzzz") == "--zzzzzz: there is no such flag; --help lists all"
    assert refused("m", "--zz\x1b[2J") == "--zz\\x1b[2J: there is no such flag; --help lists all"


def test_a_near_miss_of_a_refused_flag_does_not_lead_there() -> None:
    assert "--seed" not in refused("m", "--seeds", "3").partition("; ")[2]


def test_a_value_that_looks_like_a_flag_is_a_value() -> None:
    assert read("m", "--served-model-name", "--zzzzzz").config.served_model_name == "--zzzzzz"
    assert read("--served-model-name", "n", "--", "--zzzzzz").config.model == "--zzzzzz"


@given(st.lists(st.text(max_size=20), max_size=6))
def test_no_command_line_ends_in_a_traceback(arguments: list[str]) -> None:
    told, _ = run("m", *arguments)
    assert told.exception is None or isinstance(told.exception, SystemExit), arguments
    assert told.exit_code in (0, 2)
