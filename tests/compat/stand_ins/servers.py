"""Which of the flags that vLLM's tests start their servers with are left out, and why."""

# With a value each.
DROPPED = {
    "--dtype": "how numbers are kept changes no shape of an answer",
    "--gpu-memory-utilization": "a share of a GPU's memory",
    "--max-num-seqs": "how many sequences run at once changes no answer",
    "--max-num-batched-tokens": "likewise",
    "--max-cpu-loras": "refused by name: adapters are counted in bytes",
    "--seed": "refused by name: without a seed in a request one is drawn",
    "--structured-outputs-config.backend": "forms are followed by llguidance",
    "--attention-backend": "kernels are chosen by device",
    "--load-format": "weights are read from the model's directory",
    "--runner": "a server that generates also embeds",
    "--max-logprobs": "20 at most",
    "--chat-template": "the template is the model's own: the model is given another",
    "--port": "the server that runs has its own",
}
DROPPED_SWITCHES = {
    "--enable-lora": "nothing is needed for it",
    "--enable-chunked-prefill": "likewise",
    "--enable-auto-tool-choice": "likewise",
    "--enforce-eager": "how steps are run is not chosen by hand",
    "--no-async-scheduling": "likewise",
    "--enable-per-request-metrics": "there is no such option",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info is always there",
    "--skip-tokenizer-init": "the tokenizer is always there",
}
# The context of a server, in tokens, where a test wants more than 1,024: so few must start.
SHORT, LONGEST = 2048, 8192
# One rank is enough. Where a test says nothing, tokens are drawn as the card of the model says,
# in place of the generation_config.json that its own model would have; and no answer is longer,
# unless a test says how long: small models go on.
DEFAULTS = '{"max_new_tokens": 1024, "temperature": 0.2, "top_p": 0.9}'
HARNESS = ("--tp", "1", "--override-generation-config", DEFAULTS)
