"""All that can be known of a configuration before anything is started, for one machine.

The one place where mistakes are found: `topwork serve` comes through here before it starts Ray, and
`topwork check` does nothing else but read adapters to their ends. What an adapter, a key file or a
tokenizer must be is judged by the code that serves them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.records import Source
from cluster.adapters.versions import check_name_form
from cluster.errors import NotFound, TopworkError
from deploy.checks.address_checks import look_at_addresses
from deploy.checks.file_checks import look_at_files
from deploy.checks.memory_needs import Needs, left_for_kv, needs_of, verdict
from deploy.checks.tls_check import look_at_certificate
from deploy.checks.tokenizer_check import looking_at_tokenizer
from deploy.checks.traces_check import look_at_traces
from deploy.config import ConfigError, ServeConfig
from deploy.config_errors import Mistake, one_line
from deploy.engine_config import (
    Checked,
    adapter_limits,
    check_limits,
    check_model,
    check_ray_address,
    longest_sequence,
)
from deploy.machine import Machine

TOKENIZER_TIMEOUT = 120.0  # seconds that loading and trying it may take

LookAtAdapters = Callable[[Checked], Iterable[Mistake]]


@dataclass(frozen=True, slots=True)
class Start:
    """A configuration in which no mistake was found."""

    checked: Checked
    needs: Needs
    warnings: tuple[str, ...]
    left_for_kv: int | None  # about how many bytes of a GPU; None: they are given, or not known


def check_start(config: ServeConfig, console: Console) -> Checked:
    """Return a configuration that a server may be started with; print what may go wrong later.

    Raises:
        ConfigError: with a line for each mistake.
    """
    start = look(config, outline_adapters)
    print_warnings(start.warnings, console)
    return start.checked


def look(config: ServeConfig, look_at_adapters: LookAtAdapters) -> Start:
    """Look at everything.

    Raises:
        ConfigError: with a line for each mistake; without a model that can be served, or limits
            that agree, with the first one.
    """
    checked = check_model(config)
    check_limits(checked)
    needs = needs_of(checked)
    vocab_size = checked.model.vocab_size
    with looking_at_tokenizer(checked.model_dir, vocab_size, TOKENIZER_TIMEOUT) as tokenizer:
        mistakes = [
            *look_at_files(config),
            *look_at_certificate(config),
            *look_at_addresses(config),
            *look_at_traces(config),
            *look_at_adapters(checked),
        ]
        warnings = [*_widened(checked), *_short_kv_memory(checked)]
        machine = Machine.here()
        try:
            if config.ray_address is not None:
                check_ray_address(config.ray_address)
            warnings += verdict(checked, needs, machine)
        except ConfigError as error:
            mistakes.append(Mistake(str(error)))
        found = tokenizer()
    if found.error is not None:
        mistakes.append(Mistake(f"model: tokenizer: {one_line(found.error)}"))
    if found.warning is not None:
        warnings.append(f"model: tokenizer: {one_line(found.warning)}")
    if config.ray_address is not None:
        warnings += [f"on this machine, {one.text}" for one in mistakes if one.is_absent]
        mistakes = [one for one in mistakes if not one.is_absent]
    if mistakes:
        raise ConfigError("\n".join(one.text for one in mistakes))
    return Start(checked, needs, tuple(warnings), left_for_kv(checked, needs, machine))


def outline_adapters(checked: Checked) -> Iterator[Mistake]:
    """Yield what is wrong with each adapter that is named, as the adapter pool would at its start.

    Only what tells whether it fits is read.
    """
    reader = AdapterReader(checked.model, adapter_limits(checked.config))
    yield from mistakes_of_adapters(
        checked.config, checked.config.adapters().items(), reader.outline
    )


def mistakes_of_adapters(
    config: ServeConfig,
    adapters: Iterable[tuple[str, str]],
    read: Callable[[Source], object],
) -> Iterator[Mistake]:
    """Yield what is wrong with each of (name, directory) that is named or read."""
    for name, directory in adapters:
        try:
            check_name_form(name, config.base_name)
            read(Source(str(Path(directory).absolute())))
        except TopworkError as error:
            is_absent = isinstance(error, NotFound)
            yield Mistake(f"adapter {one_line(name)}: {one_line(error)}", is_absent=is_absent)


def print_warnings(warnings: Iterable[str], console: Console) -> None:
    """Show each on a line of its own."""
    for warning in warnings:
        text = f"[bold yellow]warning[/] {escape(warning)}"
        console.print(text, highlight=False, soft_wrap=True)


def _widened(checked: Checked) -> list[str]:
    quantization, method = checked.model.quantization, checked.config.quantization
    if quantization is None:
        return []
    if method is not None:
        are = "they are"
        if method == "int4" and quantization.has_16_codes:
            are = "codes of 4 bits whose scales 32 inputs in turn share are found again, others are"
        return [
            f"model: its linears are quantized ({quantization.method}) and are quantized once more "
            f"to {method} as they are loaded: {are} rounded twice"
        ]
    return [
        f"model: its linears are quantized ({quantization.method}) and are widened to "
        f"{checked.config.dtype} as they are loaded: they take the memory of that, and its time"
    ]


def _short_kv_memory(checked: Checked) -> list[str]:
    num_bytes = checked.config.kv_memory_bytes(checked.device)
    if num_bytes is None:  # the scheduler's log tells, when the ranks know
        return []
    num_tokens = longest_sequence(checked.config, checked.model, num_bytes)
    if num_tokens >= checked.max_model_len:
        return []
    return [
        f"kv_cache_memory has room for {num_tokens} tokens, and the model's longest context is "
        f"{checked.max_model_len}: longer prompts are refused, and answers end there"
    ]
