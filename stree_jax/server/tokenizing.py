"""Answers requests to encode and decode texts, in vLLM's form.

A prompt or a chat is encoded as for an answer, so the result is its number of tokens.
"""

from typing import Any

from stree_jax.server.errors import ApiError, invalid
from stree_jax.server.protocol import parse
from stree_jax.server.service import Service, check_name, encoded_prompts

NAMED = "return_token_strs"


def tokenized(service: Service, body: Any) -> dict[str, Any]:
    """Returns the tokens of a prompt or of a chat.

    Args:
      service: the service.
      body: the JSON body: the fields of a completion or of a chat, and
        `return_token_strs` for the texts of the tokens.

    Raises:
      ApiError: a field is invalid, or there are several prompts.
    """
    fields = dict(_object(body))
    named = fields.pop(NAMED, None) or False
    if not isinstance(named, bool):
        raise invalid(f"{NAMED}: want true or false", NAMED)
    request = parse("chat" if "messages" in fields else "completion", fields)
    check_name(service, request.model or service.name)
    prompts = encoded_prompts(service, request)
    if len(prompts) > 1:
        raise invalid("prompt: want one prompt", "prompt")
    ids = prompts[0].ids
    texts = [service.reader.tokenizer.id_to_token(i) for i in ids] if named else None
    return {
        "count": len(ids),
        "max_model_len": service.context,
        "tokens": ids,
        "token_strs": texts,
    }


def detokenized(service: Service, body: Any) -> dict[str, Any]:
    """Returns the text of tokens, with special tokens.

    Args:
      service: the service.
      body: the JSON body, with `tokens`.

    Raises:
      ApiError: a field is invalid.
    """
    fields = {name: v for name, v in _object(body).items() if v is not None}
    if extra := set(fields) - {"model", "tokens"}:
        name = min(extra)
        problem = f"Unrecognized request argument supplied: {name}"
        raise invalid(problem, name, "unknown_parameter")
    check_name(service, fields.get("model", service.name))
    ids, tokenizer = fields.get("tokens"), service.reader.tokenizer
    most = service.model.config.num_tokens - 1
    if not isinstance(ids, list) or not all(
        type(one) is int and 0 <= one <= most for one in ids
    ):
        raise invalid(f"tokens: want a list of token ids in 0..{most}", "tokens")
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}


def _object(body: Any) -> dict[str, Any]:
    """Returns a body; raises ApiError unless it is an object."""
    if not isinstance(body, dict):
        raise ApiError(400, "We could not parse the JSON body: want an object")
    return body
