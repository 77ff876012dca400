"""What OpenAI, Anthropic, vLLM and SGLang call their routes and parameters: names, nothing else.

Of openai 3.54, anthropic 2.12, vLLM 0.33.0 and SGLang 0.5.23.
"""

from collections.abc import Mapping
from types import MappingProxyType


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# By route and whose they are.
PARAMETERS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "/v1/chat/completions": {
            "OpenAI": _names(
                """
                audio frequency_penalty function_call functions logit_bias logprobs
                max_completion_tokens max_tokens messages metadata modalities model moderation
                n parallel_tool_calls prediction presence_penalty prompt_cache_key
                prompt_cache_options prompt_cache_retention reasoning_effort response_format
                safety_identifier seed service_tier stop store stream stream_options
                temperature tool_choice tools top_logprobs top_p user verbosity
                web_search_options
                """
            ),
            "vLLM": _names(
                """
                add_generation_prompt add_special_tokens allowed_token_ids bad_words
                cache_salt chat_template chat_template_kwargs continue_final_message documents
                ec_transfer_params echo frequency_penalty ignore_eos include_reasoning
                include_stop_str_in_output kv_transfer_params length_penalty logit_bias
                logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs
                messages min_p min_tokens mm_payload mm_processor_kwargs model n
                parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort
                repetition_detection repetition_penalty request_id response_format
                return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
                return_tokens_as_token_ids return_weight_versions routed_experts_prompt_start
                seed session_id skip_special_tokens spaces_between_special_tokens stop
                stop_token_ids stream stream_interval stream_options structured_outputs
                temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
                truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
                watermarking
                """
            ),
            "SGLang": _names(
                """
                bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
                continue_final_message custom_logit_processor custom_params data_parallel_rank
                disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos
                images_config input_ids logit_bias logprobs lora_path max_completion_tokens
                max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens
                mm_processor_kwargs model n no_stop_trim parallel_tool_calls presence_penalty
                priority reasoning_effort regex repetition_penalty response_format
                return_cached_tokens_details return_flat_raw_output_top_logprobs
                return_flat_raw_top_logprobs_b64 return_hidden_states
                return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext
                return_prompt_token_ids return_routed_experts return_sampling_mask
                return_spec_tokens_details return_token_ids rid routed_dp_rank
                routed_experts_start_len sampling_logprobs_mode seed separate_reasoning
                session_id session_params skip_special_tokens stop stop_regex stop_token_ids
                stream stream_options stream_reasoning task temperature thinking tool_choice
                tools top_k top_logprobs top_p use_audio_in_video user video_config watermark
                """
            ),
        },
        "/v1/completions": {
            "OpenAI": _names(
                """
                best_of echo frequency_penalty logit_bias logprobs max_tokens model n
                presence_penalty prompt seed stop stream stream_options suffix temperature
                top_p user
                """
            ),
            "vLLM": _names(
                """
                add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params
                echo frequency_penalty ignore_eos include_stop_str_in_output
                kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs
                max_tokens min_p min_tokens mm_payload model n presence_penalty priority
                prompt prompt_embeds prompt_logprobs repetition_detection repetition_penalty
                request_id response_format return_mm_kwargs return_token_ids
                return_token_offsets return_tokens_as_token_ids return_weight_versions
                routed_experts_prompt_start seed session_id skip_special_tokens
                spaces_between_special_tokens stop stop_token_ids stream stream_interval
                stream_options structured_outputs suffix temperature thinking_token_budget
                top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
                vllm_xargs watermarking
                """
            ),
            "SGLang": _names(
                """
                best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels
                custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank
                ebnf echo extra_key frequency_penalty ignore_eos images_config json_schema
                logit_bias logprobs lora_path max_tokens min_p min_tokens mm_processor_kwargs
                model n no_stop_trim presence_penalty priority prompt regex repetition_penalty
                response_format return_cached_tokens_details return_hidden_states
                return_routed_experts return_spec_tokens_details return_token_ids rid
                routed_dp_rank routed_experts_start_len seed session_id session_params
                skip_special_tokens stop stop_regex stop_token_ids stream stream_options
                suffix temperature top_k top_p user watermark
                """
            ),
        },
        "/v1/responses": {
            "OpenAI": _names(
                """
                access_programs background background_options context_management conversation
                image include input instructions max_output_tokens max_tool_calls metadata
                model moderation parallel_tool_calls previous_response_id prompt
                prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
                safety_identifier service_tier store stream stream_options temperature text
                tool_choice tools top_logprobs top_p truncation user
                """
            ),
            "vLLM": _names(
                """
                background cache_salt chat_template_kwargs ec_transfer_params
                enable_response_messages frequency_penalty ignore_eos include
                include_reasoning include_stop_str_in_output input instructions
                kv_transfer_params logit_bias max_output_tokens max_tool_calls media_io_kwargs
                metadata min_p mm_payload mm_processor_kwargs model parallel_tool_calls
                presence_penalty previous_input_messages previous_response_id priority prompt
                prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
                repetition_penalty request_id return_mm_kwargs safety_identifier seed
                service_tier session_id skip_special_tokens spaces_between_special_tokens stop
                stop_token_ids store stream structured_outputs temperature text tool_choice
                tools top_k top_logprobs top_p truncation user vllm_xargs watermarking
                """
            ),
            "SGLang": _names(
                """
                background bootstrap_host bootstrap_port bootstrap_room cache_salt
                chat_template_kwargs data_parallel_rank disagg_prefill_dp_rank extra_key
                frequency_penalty include input instructions max_output_tokens max_tool_calls
                metadata min_p model parallel_tool_calls presence_penalty previous_response_id
                priority reasoning repetition_penalty request_id routed_dp_rank service_tier
                session_id stop store stream temperature text tool_choice tools top_k
                top_logprobs top_p truncation user
                """
            ),
        },
        "/v1/embeddings": {
            "OpenAI": _names(
                """
                dimensions encoding_format input model user
                """
            ),
            "vLLM": _names(
                """
                add_generation_prompt add_special_tokens cache_salt chat_template
                chat_template_kwargs continue_final_message dimensions embed_dtype
                encoding_format endianness input media_io_kwargs messages mm_processor_kwargs
                model padding priority request_id truncate_prompt_tokens truncation_side
                use_activation user
                """
            ),
            "SGLang": _names(
                """
                dimensions embed_override_token_id embed_overrides encoding_format input
                lora_path model priority rid user
                """
            ),
        },
        "/v1/messages": {
            "Anthropic": _names(
                """
                cache_control container diagnostics inference_geo max_tokens messages metadata
                model output_config service_tier speed stop_sequences stream system thinking
                tool_choice tools user_profile_id workspace_id
                """
            ),
            "vLLM": _names(
                """
                cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params
                max_tokens messages metadata mm_payload model output_config return_mm_kwargs
                stop_sequences stream system temperature thinking tool_choice tools top_k
                top_p vllm_xargs watermarking
                """
            ),
            "SGLang": _names(
                """
                betas bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank
                max_tokens messages metadata model output_config routed_dp_rank stop_sequences
                stream system temperature thinking tool_choice tools top_k top_p
                """
            ),
        },
        "/v1/messages/count_tokens": {
            "Anthropic": _names(
                """
                cache_control messages model output_config speed system thinking tool_choice
                tools user_profile_id workspace_id
                """
            ),
            "vLLM": _names(
                """
                chat_template_kwargs messages model output_config system thinking tool_choice
                tools
                """
            ),
            "SGLang": _names(
                """
                betas messages model output_config system thinking tool_choice tools
                """
            ),
        },
        "/v1/classify": {
            "vLLM": _names(
                """
                add_generation_prompt add_special_tokens cache_salt chat_template
                chat_template_kwargs continue_final_message input media_io_kwargs messages
                mm_processor_kwargs model padding priority request_id truncate_prompt_tokens
                truncation_side use_activation user
                """
            ),
            "SGLang": _names(
                """
                input model priority rid user
                """
            ),
        },
        "/v1/rerank": {
            "vLLM": _names(
                """
                cache_salt chat_template_kwargs documents instruction max_tokens_per_doc
                max_tokens_per_query mm_processor_kwargs model padding priority query
                request_id top_n truncate_prompt_tokens truncation_side use_activation user
                """
            ),
            "SGLang": _names(
                """
                documents instruct query return_documents top_n
                """
            ),
        },
        "/tokenize": {
            "vLLM": _names(
                """
                add_generation_prompt add_special_tokens chat_template chat_template_kwargs
                continue_final_message media_io_kwargs messages mm_processor_kwargs model
                prompt return_token_strs tools
                """
            ),
            "SGLang": _names(
                """
                add_generation_prompt add_special_tokens chat_template_kwargs
                continue_final_message messages model prompt reasoning_effort tool_choice
                tools
                """
            ),
        },
        "/detokenize": {
            "vLLM": _names(
                """
                model tokens
                """
            ),
            "SGLang": _names(
                """
                model skip_special_tokens tokens
                """
            ),
        },
        "/v1/load_lora_adapter": {
            "vLLM": _names(
                """
                is_3d_lora_weight load_inplace lora_name lora_path
                """
            ),
        },
        "/v1/unload_lora_adapter": {
            "vLLM": _names(
                """
                lora_int_id lora_name
                """
            ),
        },
    }
)

# Routes, with whose they are.
ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "POST /v1/chat/completions": "OpenAI, vLLM, SGLang",
        "GET /v1/chat/completions": "OpenAI",
        "POST /v1/completions": "OpenAI, vLLM, SGLang",
        "POST /v1/embeddings": "OpenAI, vLLM, SGLang",
        "POST /v1/responses": "OpenAI, vLLM, SGLang",
        "GET /v1/responses/{response_id}": "OpenAI, vLLM, SGLang",
        "DELETE /v1/responses/{response_id}": "OpenAI",
        "POST /v1/responses/{response_id}/cancel": "OpenAI, vLLM, SGLang",
        "GET /v1/responses/{response_id}/input_items": "OpenAI",
        "POST /v1/responses/input_tokens": "OpenAI",
        "GET /v1/models": "OpenAI, Anthropic, vLLM, SGLang",
        "GET /v1/models/{name}": "OpenAI, Anthropic, SGLang",
        "POST /v1/audio/transcriptions": "OpenAI, vLLM, SGLang",
        "POST /v1/audio/translations": "OpenAI, vLLM",
        "POST /v1/files": "OpenAI",
        "POST /v1/batches": "OpenAI",
        "POST /v1/images/generations": "OpenAI",
        "POST /v1/moderations": "OpenAI",
        "POST /v1/messages": "Anthropic, vLLM, SGLang",
        "POST /v1/messages/count_tokens": "Anthropic, vLLM, SGLang",
        "POST /v1/messages/batches": "Anthropic",
        "POST /v1/score": "vLLM",
        "POST /score": "vLLM",
        "POST /v1/rerank": "vLLM, SGLang",
        "POST /rerank": "vLLM",
        "POST /v2/rerank": "vLLM",
        "POST /classify": "vLLM, SGLang",
        "POST /pooling": "vLLM",
        "POST /v2/embed": "vLLM",
        "POST /v1/decisions": "vLLM, SGLang",
        "POST /v1/systemone": "vLLM, SGLang",
        "POST /generative_scoring": "vLLM",
        "POST /v1/chat/completions/batch": "vLLM",
        "POST /v1/chat/completions/render": "vLLM",
        "POST /v1/completions/render": "vLLM",
        "POST /v1/chat/completions/derender": "vLLM",
        "POST /v1/completions/derender": "vLLM",
        "POST /v1/messages/render": "vLLM",
        "POST /v1/responses/render": "vLLM",
        "POST /inference/v1/generate": "vLLM",
        "POST /generate": "SGLang",
        "POST /tokenize": "vLLM, SGLang",
        "POST /detokenize": "vLLM, SGLang",
        "GET /tokenizer_info": "vLLM",
        "POST /v1/load_lora_adapter": "vLLM",
        "POST /v1/unload_lora_adapter": "vLLM",
        "POST /load_lora_adapter": "SGLang",
        "POST /unload_lora_adapter": "SGLang",
        "POST /load_lora_adapter_from_tensors": "SGLang",
        "GET /health": "vLLM, SGLang",
        "GET /health_generate": "SGLang",
        "GET /ready": "SGLang",
        "GET /ping": "vLLM, SGLang",
        "POST /ping": "vLLM",
        "POST /invocations": "vLLM, SGLang",
        "GET /version": "vLLM",
        "GET /load": "vLLM",
        "GET /metrics": "vLLM, SGLang",
        "GET /server_info": "vLLM, SGLang",
        "GET /model_info": "SGLang",
        "POST /reset_prefix_cache": "vLLM",
        "POST /flush_cache": "SGLang",
        "POST /abort_requests": "vLLM",
        "POST /abort_request": "SGLang",
        "POST /pause": "vLLM",
        "POST /resume": "vLLM",
        "POST /sleep": "vLLM",
        "POST /wake_up": "vLLM",
        "POST /update_weights": "vLLM",
        "POST /update_weights_from_disk": "SGLang",
        "POST /update_weights_from_tensor": "SGLang",
        "POST /release_memory_occupation": "SGLang",
        "POST /open_session": "SGLang",
        "POST /parse_function_call": "SGLang",
        "POST /separate_reasoning": "SGLang",
        "POST /start_profile": "vLLM, SGLang",
        "POST /collective_rpc": "vLLM",
        "POST /scale_elastic_ep": "vLLM",
        "GET /v1/realtime": "vLLM",
    }
)

# Why those are missing that this server has not.
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "GET /v1/chat/completions": "chats are not stored; responses are",
        "POST /v1/audio/transcriptions": "models of text only",
        "POST /v1/audio/translations": "models of text only",
        "POST /v1/files": "nothing of a caller's is kept but responses",
        "POST /v1/batches": "send the calls: they are batched as they come",
        "POST /v1/images/generations": "models of text only",
        "POST /v1/moderations": "answers are not judged",
        "POST /v1/messages/batches": "send the calls: they are batched as they come",
        "POST /pooling": "use `/v1/embeddings` or `/v1/classify`",
        "POST /v2/embed": "use `/v1/embeddings`",
        "POST /v1/decisions": "use a form of the answer, or `/v1/classify`",
        "POST /v1/systemone": "use a form of the answer, or `/v1/classify`",
        "POST /generative_scoring": "use `/v1/score`",
        "POST /v1/chat/completions/batch": "send the calls: they are batched as they come",
        "POST /v1/chat/completions/derender": "answers come as text",
        "POST /v1/completions/derender": "answers come as text",
        "POST /v1/messages/render": "use `/v1/chat/completions/render`",
        "POST /v1/responses/render": "use `/v1/chat/completions/render`",
        "POST /inference/v1/generate": "use `/v1/completions`, which takes and gives token ids",
        "POST /generate": "use `/v1/completions`",
        "GET /health_generate": "`/health` looks at the steps that ranks make",
        "GET /load": "`/metrics` has what runs and waits",
        "GET /server_info": "`GET /v1/models` and `/metrics` have what callers need",
        "GET /model_info": "`GET /v1/models` has it",
        "POST /flush_cache": "use `/reset_prefix_cache`",
        "POST /abort_requests": "a call ends with its connection; responses have `cancel`",
        "POST /abort_request": "a call ends with its connection; responses have `cancel`",
        "POST /pause": "`POST /v1/drain` refuses new calls",
        "POST /resume": "`DELETE /v1/drain` takes them again",
        "POST /sleep": "weights stay where they are",
        "POST /wake_up": "weights stay where they are",
        "POST /update_weights": "a trainer posts adapters",
        "POST /update_weights_from_disk": "a trainer posts adapters",
        "POST /update_weights_from_tensor": "a trainer posts adapters",
        "POST /release_memory_occupation": "weights stay where they are",
        "POST /open_session": "no sessions are kept; prefixes are found by what they are",
        "POST /parse_function_call": "answers come parsed",
        "POST /separate_reasoning": "answers come parsed",
        "POST /start_profile": "`topwork bench` profiles",
        "POST /collective_rpc": "no code of a caller is run",
        "POST /scale_elastic_ep": "there is no expert parallelism",
        "GET /v1/realtime": "models of text only",
    }
)
