"""A server whose model answers every chat with the same text."""

from stree_jax.checkpoints.load import load
from stree_jax.cli.served_template import template_format
from stree_jax.server.batch import Batch
from stree_jax.server.engine import Engine
from stree_jax.server.metrics import Metrics
from stree_jax.server.rows import Sizes
from stree_jax.speculation.default_tree import spec_for
from tests.support import table_models
from tests.support.table_server import table_service

END = "<|im_end|>"
# A template as of models with JSON calls in tags. An answer begins after a new line.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
    "}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
MARKS = ("<tool_call>", "</tool_call>")


def visible(text):
    """Returns a text, or bytes, as byte-level tokenizers write it."""
    visible_bytes = {b: chr(b) for b in range(256) if chr(b).isprintable()}
    del visible_bytes[ord(" ")]
    others = [b for b in range(256) if b not in visible_bytes]
    visible_bytes |= {b: chr(256 + place) for place, b in enumerate(others)}
    data = text if isinstance(text, bytes) else text.encode()
    return "".join(visible_bytes[b] for b in data)


def write_answer(folder, pieces, template=HERMES, special=MARKS):
    """Writes a model that answers with the pieces, one a token, which must differ.

    Args:
      special: texts of further special tokens, which may be pieces.
    """
    special = (*table_models.SPECIAL, *special)
    names = [piece if piece in special else visible(piece) for piece in pieces]
    more = [name for name in names if name not in special]
    tokenizer = table_models.byte_level(special, more)
    end = tokenizer.token_to_id(END)
    chain = table_models.follow(tokenizer, ["\u010a", *names, END])
    model = dict(tokenizer=tokenizer, chain=chain, config={"eos_token_id": end})
    path = table_models.write_llama(folder, len(chain), **model)
    (path / "chat_template.jinja").write_text(template)
    return path


def answer_service(path, context=2048):
    """Returns a service for a model directory; see `write_answer`."""
    model = load(path)
    sizes = Sizes(rows=2, context=context, steps=2, top_logprobs=2)
    batch = Batch(model, spec_for(model, None, None, None, None), sizes)
    engine = Engine(batch, 8)
    form = template_format(str(path))
    return table_service(path, engine=engine, metrics=Metrics(engine), form=form)
