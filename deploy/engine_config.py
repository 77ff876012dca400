"""Compares a configuration with the model and the machine, and derives the limits of the parts.

Starts nothing. How much memory it takes, and whether its adapters are sound, is asked elsewhere.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.sharding import RankMemory
from cluster.router.config import SamplingDefaults
from cluster.scheduler.config import SchedulerConfig
from deploy.config import ConfigError, ServeConfig
from deploy.config_errors import one_line
from deploy.generation_config import sampling_defaults
from deploy.local_model import base_digest
from deploy.machine import num_cores
from deploy.memory.estimate import largest_layer_page, largest_state_page
from deploy.memory.weights import ITEM_BYTES
from deploy.models import find_model
from kernels.gpu.constants import HEAD_DIMS, PAGE_SIZES
from kernels.native.build import BuildError, check_machine
from worker.cache.page_budget import PageKinds, cut_budget, page_kinds
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config
from worker.weights.checkpoint_files import check_checkpoint
from worker.weights.partition import check_groups, check_tp


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration whose model has been found and read."""

    config: ServeConfig
    model_dir: Path
    model: ModelConfig
    max_model_len: int
    device: str
    threads: int
    sampling_defaults: SamplingDefaults = SamplingDefaults()


def check_model(config: ServeConfig, device: str | None = None) -> Checked:
    """Find the model, look at all its files but the tokenizer's, compare the configuration with it.

    Of weights the headers are read, and nothing else. `device` is the ranks', where it is decided;
    None: `find_device` decides.

    Raises:
        ConfigError: naming the key at fault.
    """
    model_dir = find_model(config.model, config.revision)
    try:
        model = read_model_config(model_dir)
        check_tp(model, config.tp)
        if config.has_exact_sums:
            check_groups(model, config.tp)
        check_checkpoint(model_dir, model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {one_line(error)}") from error
    longest = model.max_position
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len: {config.max_model_len} is over the model's {longest}")
    device = device or find_device(config.device)
    check_device(device, config.page_size, model.head_dim)
    check_quantization(config, device)
    check_kv_cache_dtype(config, device)
    check_lora_dtype(config, device)
    check_kv_memory(config, model, device)
    return Checked(
        config=config,
        model_dir=model_dir,
        model=model,
        max_model_len=config.max_model_len or longest,
        device=device,
        threads=config.threads_per_rank or max(1, num_cores() // config.tp),
        sampling_defaults=sampling_defaults(config, model_dir),
    )


def longest_sequence(config: ServeConfig, model: ModelConfig, num_bytes: int) -> int:
    """Return for how many tokens of one sequence so many bytes of KV memory have pages."""
    kinds = _page_kinds(config, model)
    pages = largest_layer_page(config, model), largest_state_page(config, model)
    counts = cut_budget(num_bytes, kinds, *pages)
    if kinds.window and counts.window < kinds.window_pages_each:  # no window can move
        return min(counts.full, counts.window) * config.page_size
    return counts.full * config.page_size


def _page_kinds(config: ServeConfig, model: ModelConfig) -> PageKinds:
    return page_kinds(model, config.page_size, config.max_model_len or model.max_position)


def check_kv_memory(config: ServeConfig, model: ModelConfig, device: str) -> None:
    """Refuse KV memory without room for a page, or for the length that is asked for.

    What a GPU has left is known when the ranks have loaded the model.

    Raises:
        ConfigError: with what a page takes.
    """
    layer, kinds = largest_layer_page(config, model), _page_kinds(config, model)
    page, state = layer * len((*kinds.full_layers, *kinds.window_layers)), 0
    is_page = f"a page of {config.page_size} tokens takes {page} bytes on a rank"
    if kinds.state_layers:  # at least two of which there must be
        state = 2 * largest_state_page(config, model)
        is_page += f", and two pages of states {state}"
    num_bytes = config.kv_memory_bytes(device)
    if num_bytes is not None:
        num_tokens = longest_sequence(config, model, num_bytes)
        if num_tokens < 2:
            raise ConfigError(f"kv_cache_memory: {num_bytes} bytes are too few: {is_page}")
        if config.max_model_len is not None and num_tokens < config.max_model_len:
            longest = kinds.pages_each * len(kinds.full_layers)
            longest += kinds.window_pages_each * len(kinds.window_layers)
            raise ConfigError(
                f"kv_cache_memory: {num_bytes} bytes hold {num_tokens} tokens, less than "
                f"max_model_len {config.max_model_len}, which takes {longest * layer + state}"
            )
    if 0 < config.kv_host_memory < page + state:
        raise ConfigError(f"kv_host_memory: {config.kv_host_memory} bytes are too few: {is_page}")


def scheduler_config(checked: Checked) -> SchedulerConfig:
    """Return the limits of every scheduler; the number of pages is the ranks' to say.

    Raises:
        ConfigError: as `check_limits`.
    """
    config = checked.config
    kind = config.dtype, config.quantization, config.kv_cache_dtype, config.lora_dtype
    digest = base_digest(checked.model_dir, *kind)
    return _scheduler_config(checked, digest)


def check_limits(checked: Checked) -> None:
    """Refuse limits of schedulers that exclude each other.

    Raises:
        ConfigError: if some work could never progress under them.
    """
    _scheduler_config(checked, "")


def _scheduler_config(checked: Checked, digest: str) -> SchedulerConfig:
    config = checked.config
    try:
        return SchedulerConfig(
            base_digest=digest,
            num_pages=0,
            page_size=config.page_size,
            max_model_len=checked.max_model_len,
            num_slots=config.max_loras,
            adapter_memory=config.adapter_memory,
            max_running=config.num_sequences(checked.device),
            max_waiting=config.max_waiting,
            token_budget=config.token_budget(checked.device),
            prefix_cache=config.prefix_cache,
            fairness=config.fairness,
        )
    except ValueError as error:
        raise ConfigError(f"max_num_batched_tokens, max_num_seqs, page_size: {error}") from error


def find_device(wanted: str) -> str:
    """Return "cpu" or "cuda"; "auto" takes a GPU where one can be seen.

    Raises:
        ConfigError: if cuda is wanted and there is none.
    """
    has_gpu = Path("/dev/nvidiactl").exists()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("device: cuda is wanted, but this machine shows no NVIDIA device")
    if wanted == "auto":
        return "cuda" if has_gpu else "cpu"
    return wanted


def check_ray_address(ray_address: str) -> None:
    """Refuse a cluster where nothing listens: Ray itself would try for two minutes, and exit.

    Raises:
        ConfigError: if nothing accepts a connection at HOST:PORT.
    """
    host, separator, port = ray_address.rpartition(":")
    if "://" in ray_address or not separator or not port.isdecimal():
        return  # "auto" and the like: Ray finds out where that is
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"ray_address: nothing answers at {ray_address}: {error}") from error


def check_device(device: str, page_size: int, head_dim: int) -> None:
    """Refuse what the kernels of a device do not compute.

    Raises:
        ConfigError: naming the key at fault, and what would do.
    """
    if device != "cuda":
        return
    if page_size not in PAGE_SIZES:
        raise ConfigError(f"page_size: {page_size} on a GPU; take one of {_listed(PAGE_SIZES)}")
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"model: its head_dim is {head_dim}; on a GPU only {_listed(HEAD_DIMS)} are supported"
        )


def check_kv_cache_dtype(config: ServeConfig, device: str) -> None:
    """Refuse a type of K and V that the device does not read.

    Raises:
        ConfigError: with what to do.
    """
    if config.kv_cache_dtype != "auto" and device != "cpu":
        raise ConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype} is read on CPUs alone; leave it out, or set "
            "device to cpu"
        )


def check_lora_dtype(config: ServeConfig, device: str) -> None:
    """Refuse adapters in fewer bits on CPUs that cannot read them; GPUs hold them as dtype says.

    Raises:
        ConfigError: with what is missing.
    """
    if config.lora_dtype == "auto" or device != "cpu" or config.ray_address is not None:
        return
    try:
        check_machine()
    except BuildError as error:
        raise ConfigError(
            f"lora_dtype: {config.lora_dtype} is read by the C library alone, which cannot be made "
            f"here: {one_line(error)}; leave it out"
        ) from error


def check_quantization(config: ServeConfig, device: str) -> None:
    """Refuse fewer bits where they cannot be computed; other hosts' ranks see for themselves.

    Raises:
        ConfigError: with what is missing.
    """
    method = config.quantization
    if method is None:
        return
    if device != "cpu":
        raise ConfigError(
            f"quantization: {method} is computed on CPUs alone; leave it out, or set device to cpu"
        )
    if config.ray_address is not None:
        return
    try:
        check_machine()
    except BuildError as error:
        raise ConfigError(
            f"quantization: {method} is computed by the C library alone, which cannot be made "
            f"here: {one_line(error)}; leave it out"
        ) from error


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def rank_memory(checked: Checked) -> RankMemory:
    """Return what of adapters the ranks hold."""
    item_bytes = ITEM_BYTES[checked.config.dtype]
    adapter_item_bytes = item_bytes
    if checked.device == "cpu":
        # Ranks on a CPU hold adapters in the model's dtype, or in float32 where there is no C
        # compiler, which int8 needs. Which of the two is known only when they start, so the
        # larger is claimed.
        adapter_item_bytes = 1 if checked.config.lora_dtype == "int8" else 4
    return RankMemory(
        tp=checked.config.tp,
        has_exact_sums=checked.config.has_exact_sums,
        adapter_item_bytes=adapter_item_bytes,
        model_item_bytes=item_bytes,
        adapter_bytes=checked.config.adapter_memory,
    )


def adapter_limits(config: ServeConfig) -> AdapterLimits:
    """Return what an adapter may be at most."""
    return AdapterLimits(max_lora_rank=config.max_lora_rank)
