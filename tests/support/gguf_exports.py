"""Cases and tokenizers for the tests of exported GGUF files."""

import numpy as np
from tokenizers.processors import TemplateProcessing

from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.gguf_vocabulary import piece_tokenizer
from tests.support.gguf_files import GGUF_CASES
from tests.support.vocabularies import pieces

# Files of a spelling that is not written, and files with MTP layers.
OTHERS = ("kimi-linear-joined", "gemma4-moe-apart", "qwen35-mtp", "qwen35moe-mtp")
CASES = [name for name in GGUF_CASES if name not in OTHERS]
PRES = ("gpt-2", "olmo", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35")


def with_template(tokenizer, first, last):
    """Adds a token before and one after every text, if they are not empty."""
    single = [w for w in (first, "$A", last) if w]
    ids = [(t, tokenizer.token_to_id(t)) for t in (first, last) if t]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


def sentencepiece():
    """Returns a SentencePiece BPE tokenizer, as from a `tokenizer.model`."""
    tokens, scores = pieces()
    types = np.array([3, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)], np.int32)
    values = {"model": "llama", "tokens": tokens, "token_type": types}
    values["scores"] = np.array(scores, np.float32)
    return piece_tokenizer(ConfigFields("none", values))
