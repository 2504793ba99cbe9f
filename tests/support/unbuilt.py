"""Makes the building of tokenizers fail, to show that a function builds none."""

from contextlib import contextmanager
from unittest.mock import patch

import tokenizers


@contextmanager
def no_tokenizer_is_built():
    """Within the context, making a tokenizer or its vocabulary raises an
    AssertionError."""
    error = AssertionError("a tokenizer is built")
    with (
        patch.object(tokenizers, "Tokenizer", side_effect=error) as whole,
        patch.object(tokenizers.models, "BPE", side_effect=error) as vocabulary,
    ):
        whole.from_str.side_effect = error
        vocabulary.read_file.side_effect = error
        yield
