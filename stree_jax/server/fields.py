"""The known fields of requests: which are read, have no effect, or must be neutral.

The fields are those of OpenAI's API reference for completions and chat completions, and
those that vLLM, SGLang and llama.cpp add to them. Any other field is an error.
"""

from typing import Any, Literal

Kind = Literal["completion", "chat"]

# Names of the maximum number of tokens of an answer. The first one in a request
# counts, as in llama.cpp (`n_predict` is its own) and vLLM.
MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens")
# Names of the maximum number of tokens of the reasoning, in vLLM and llama.cpp.
BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens")
# Fields that OpenAI, vLLM or llama.cpp accept and that do not change the text here.
WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "prediction",  # makes OpenAI's servers faster
    "verbosity",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "parallel_tool_calls",  # of chats, it is read
    "parse_tool_calls",  # llama.cpp; of chats, it is read
    "request_id",  # vLLM
    "rid",  # SGLang
    "priority",  # vLLM; here requests are served in the order of arrival
    "kv_transfer_params",  # vLLM
    "cache_prompt",  # llama.cpp, like all of these
    "n_cache_reuse",
    "backend_sampling",
    "speculative.n_max",
    "speculative.n_min",
    "speculative.p_min",
    "speculative.type",
}
# Settings of llama.cpp's other samplers, which `NEUTRAL` requires to be off.
WITHOUT_EFFECT |= {
    "dynatemp_exponent",
    "mirostat_tau",
    "mirostat_eta",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_threshold",
    "adaptive_decay",
}
# Unsupported fields, with values that have no effect. Other values are errors.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "typical_p": (1,),  # llama.cpp, like all of these
    "typ_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "min_keep": (0,),
    "repeat_last_n": (-1,),  # -1 is the whole text
    "n_probs": (0,),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "post_sampling_probs": (False,),
    "id_slot": (-1,),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "preserved_tokens": ([],),
    "samplers": (),
    "top_n_sigma": (-1,),
    "adaptive_target": (-1,),
    "penalize_nl": (False,),
    "n_keep": (0,),
    "n_discard": (0,),
    "t_max_predict_ms": (-1, 0),
    "lora": ([],),
    "image_data": ([],),
    "response_fields": ([],),
    "reasoning_control": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "return_tokens": (False,),
    "detokenize": (True,),  # vLLM and SGLang, like all of these
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "structural_tag": (),
    "guided_grammar": (),
    "ebnf": (),
    "vllm_xargs": ({},),
}
NEUTRAL_OF: dict[Kind, dict[str, tuple[Any, ...]]] = {
    "completion": {
        "tools": ([],),
        "tool_choice": ("none", "auto"),  # "auto" chooses none of an empty list
        "reasoning_format": ("none", "auto"),  # completions have no reasoning
        "separate_reasoning": (False,),
        "suffix": ("",),
        "add_special_tokens": (True,),
    },
    "chat": {
        "echo": (False,),
        "add_special_tokens": (False,),
        "best_of": (1,),
        "documents": ([],),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
    },
}
READ = {
    *MAX_TOKENS,
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",  # vLLM, like the two below
    "stop_token_ids",
    "cache_salt",
    *BUDGETS,
    "n",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "logprobs",
    "logit_bias",
    "ignore_eos",
    "return_origins",  # of this server only
    "response_format",
    "structured_outputs",  # vLLM, like the three below
    "guided_json",
    "guided_regex",
    "guided_choice",
    "regex",  # SGLang
    "json_schema",  # SGLang and llama.cpp
}
READ_OF: dict[Kind, set[str]] = {
    "completion": {"prompt", "best_of", "echo"},
    "chat": {
        "messages",
        "top_logprobs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "reasoning_effort",
        "reasoning_format",
        "separate_reasoning",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "parse_tool_calls",
    },
}
