"""What a router counts and measures of its own calls: names, words and labels, without a value."""

from cluster.histogram import (
    CHOICES_BUCKETS,
    E2E_BUCKETS,
    ITL_BUCKETS,
    REQUEST_TOKENS_BUCKETS,
    TTFT_BUCKETS,
)
from cluster.router.metrics.families import counter, histogram

BY_ADAPTER = ("model", "adapter", "router")
BY_MODEL = ("model", "router")
BY_TENANT = ("tenant", "router")

COUNTERS = (
    counter("requests", "Answers that ended, by reason; one that failed has the error's name.",
            "model", "adapter", "finish_reason", "router"),
    counter("finished_requests",
            "Answers that ended, by how, also of adapters that are not registered any more; abort: "
            "nobody waited for them.", "finished_reason", "router"),
    counter("prompt_tokens", "Prompt tokens, once for all answers to a prompt.", *BY_ADAPTER),
    counter("generation_tokens", "Tokens of ended answers.", *BY_ADAPTER),
    counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.", *BY_ADAPTER),
    counter("first_tokens", "Answers that have begun.", *BY_ADAPTER),
    counter("first_token_wait_seconds",
            "Their times to first token together: over topwork_first_tokens_total, the mean.",
            *BY_ADAPTER),
    counter("tenant_requests", "Answers that have begun, by tenant, where keys are on.",
            *BY_TENANT),
    counter("tenant_computed_prompt_tokens",
            "Prompt tokens that were not found in the prefix cache, once for all answers to a "
            "prompt.", *BY_TENANT),
    counter("tenant_cached_prompt_tokens", "Prompt tokens found in the prefix cache.",
            *BY_TENANT),
    counter("tenant_generation_tokens", "Tokens of answers, also of those that were broken off.",
            *BY_TENANT),
    counter("tenant_adapter_seconds",
            "Seconds of answers by adapters, each from its first token to its last.", *BY_TENANT),
    counter("rejections", "Calls refused because a limit is reached.", "reason", "router"),
    counter("client_disconnects", "Calls whose client went away before the end.", "router"),
    counter("broken_streams", "Streams that ended with an error after they had begun.", "router"),
    counter("stream_continuations",
            "Answers that went on in another scheduler, or by another connection, by why they had "
            "to: theirs died, hung, had no ranks or was to end.", "reason", "router"),
    counter("api_key_file_errors",
            "Looks at the file of API keys, one each second, that found it of no use.", "router"),
    counter("background_task_failures",
            "Ends of background tasks that must not end; each is begun again.", "task", "router"),
    counter("request_log_lost_lines",
            "Calls that are missing in the request log: it is written too slowly, or not at all.",
            "router"),
    counter("http_requests", "HTTP responses, by route and status; 499: the client had gone.",
            "route", "code", "router"),
)  # fmt: skip
HISTOGRAMS = (
    histogram("time_to_first_token_seconds", "From a call's arrival to its first token.",
              TTFT_BUCKETS, *BY_MODEL),
    histogram("inter_token_latency_seconds", "From one token to the next.",
              ITL_BUCKETS, *BY_MODEL),
    histogram("time_per_output_token_seconds", "An answer's mean time per token after the first.",
              ITL_BUCKETS, *BY_MODEL),
    histogram("e2e_request_latency_seconds", "From a call's arrival to its answer's end.",
              E2E_BUCKETS, *BY_MODEL),
    histogram("stream_interruption_seconds",
              "From the loss of an answer that had begun to its next token.",
              TTFT_BUCKETS, *BY_MODEL),
    histogram("request_prompt_tokens", "Prompt tokens of an answer that ended.",
              REQUEST_TOKENS_BUCKETS, *BY_MODEL),
    histogram("request_prefill_kv_computed_tokens",
              "Prompt tokens of an answer that were not found in the prefix cache.",
              REQUEST_TOKENS_BUCKETS, *BY_MODEL),
    histogram("request_generation_tokens", "Tokens of an answer that ended.",
              REQUEST_TOKENS_BUCKETS, *BY_MODEL),
    histogram("request_params_max_tokens", "Tokens that an answer may have.",
              REQUEST_TOKENS_BUCKETS, *BY_MODEL),
    histogram("request_params_n", "Answers to a prompt.", CHOICES_BUCKETS, *BY_MODEL),
    histogram("request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.",
              REQUEST_TOKENS_BUCKETS, *BY_MODEL),
)  # fmt: skip
ADAPTER_COUNTERS = tuple(family for family in COUNTERS if "adapter" in family.labels)
