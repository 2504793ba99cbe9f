"""The chat template of the model that `stree-jax serve` serves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from stree_jax.models import Model
    from stree_jax.server.chat_format import ChatFormat
    from stree_jax.server.protocol import Turn
    from stree_jax.server.service import Spell


def speller(name: str, model: "Model", template: str | None = None) -> "Spell | None":
    """Returns a function that encodes conversations, or None without a chat template.

    Args:
      name: the model's name, as in --model.
      template: a template to use in place of the model's.
    """
    from stree_jax.cli.chat import Message
    from stree_jax.cli.template_use import format_of, render_checked
    from stree_jax.convert.tokenizers.whole_texts import for_whole_texts

    tokenizer = model.tokenizer
    template, special = template_of(name, template)
    if template is None or tokenizer is None:
        return None
    form = format_of(template, special)

    def prepared(messages: Sequence[Message]) -> Sequence[Message]:
        return cast(Sequence[Message], form.prepared(messages))

    def spell(messages: Sequence[dict[str, Any]], turn: "Turn") -> list[int]:
        checked = cast(Sequence[Message], messages)
        options = vars(turn) | {"prepared": prepared}
        text = render_checked(template, checked, special, **options)
        whole = for_whole_texts(tokenizer)
        return whole.encode(text, add_special_tokens=False).ids

    return spell


def template_of(name: str, template: str | None) -> tuple[str | None, dict[str, str]]:
    """Returns the chat template (None without one) and the texts of special tokens.

    Args:
      name: the model's name, as in --model.
      template: a template to use in place of the model's.
    """
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.cli.chat import read_chat_template, read_special_tokens
    from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles

    files = CheckpointFiles(resolve(name))
    if template is None:
        template = read_chat_template(files)
    return template, read_special_tokens(files) if template is not None else {}


def template_format(name: str, template: str | None = None) -> "ChatFormat":
    """Returns what a model's chat template supports.

    Args:
      name: the model's name, as in --model.
      template: a template to use in place of the model's.
    """
    from stree_jax.cli.template_use import format_of

    return format_of(*template_of(name, template))
