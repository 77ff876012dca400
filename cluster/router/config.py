"""What a router must know before it starts: names, limits and time-outs."""

from dataclasses import dataclass

from worker.classifier_config import ClassifierConfig

STANDARD_ERROR = "-"  # as a file


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """How requests are sampled that do not say it themselves: OpenAI's way, unless changed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None: what the context leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Limits and names of one router; times are in seconds."""

    model_name: str  # what clients call the base model
    model_dir: str  # where its tokenizer lies
    context_length: int  # tokens of prompt and answer together
    vocab_size: int  # rows of the model's embedding
    eos_token_ids: tuple[int, ...]  # end an answer unless the request says ignore_eos
    pad_token_id: int | None = None  # what prompts to classify may end in
    classifier: ClassifierConfig | None = None  # of the model's head, in place of lm_head
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    page_size: int = 64  # tokens of one KV page, by which prompts are remembered
    version: str = "unknown"
    api_key_file: str | None = None  # None: nobody needs a key
    anonymous: bool = False  # without keys, nobody may change what is served
    max_in_flight: int = 1024  # answers being generated, over all connections
    max_prompts: int = 128  # in one call of /v1/completions
    max_choices: int = 16  # answers to one prompt: n and best_of
    max_answers: int = 128  # of one call, to all its prompts
    max_body_bytes: int = 8 * 1024 * 1024
    max_adapter_labels: int = 1000  # adapters with metric series of their own
    vllm_metrics: bool = False
    otlp_traces_endpoint: str | None = None  # None: there are no traces
    request_log: str | None = None  # a file, or STANDARD_ERROR; None: calls are not logged
    request_log_content: bool = False  # with prompts and answers
    trust_request_chat_template: bool = False
    template_timeout: float = 2.0  # that a template of a request may take
    enable_prompt_tokens_details: bool = True  # usage tells how much of a prompt was cached
    lenient_parameters: bool = False  # what is unknown or not supported is ignored, not refused
    tool_call_parser: str = "auto"  # auto: what the chat template says; none; or a name
    reasoning_parser: str = "auto"
    retry_after: int = 1
    refresh_interval: float = 1.0  # between looks at the list of schedulers, and at each of them
    # A scheduler that is silent for longer is taken for lost. With the interval before it, one that
    # is stopped is noticed within 5 s. One that is only slow, on a machine without a core to spare,
    # is left for nothing then: its streams pause, and go on by its prefix cache.
    scheduler_timeout: float = 3.5
    recovery_timeout: float = 120.0  # that a stream waits for a scheduler when its own is lost
    health_timeout: float = 2.0
    stream_keep: float = 60.0  # that a resumable stream waits for its reader to come back
    response_keep: float = 3600.0  # that what a stored response said is kept
