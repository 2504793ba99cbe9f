"""The place where an answer's tokens will be constrained to a form.

Constrained decoding is not part of this version. Requests that need it are refused
here, and only here.
"""

from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.errors import invalid
from stree_jax.server.protocol import Request


def constraint_of(request: Request, form: ChatFormat) -> None:
    """Returns the constraint on the text of an answer, or None if it has none.

    A constraint for `tool_choice` "required" or a named function makes the answer begin
    with `form.calls.opening` and allows only calls of `request.tool_use.for_template`.

    Args:
      request: the request. `tool_use` says which calls it demands.
      form: the format of the chat template, which says how calls are written.

    Raises:
      ApiError: the request needs a constraint, which is not supported yet.
    """
    use = request.tool_use
    if use.choice in ("required", "function"):
        value = '"required"' if use.choice == "required" else "a named function"
        problem = f"tool_choice: {value} is not supported yet"
        raise invalid(problem, "tool_choice", "unsupported_value")
    return None
