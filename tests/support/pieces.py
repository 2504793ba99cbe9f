"""A tokenizer whose tokens split characters, and a reference for its texts."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# The pieces split characters of two, three and four bytes, so that random text has
# whole, split and malformed characters. Id 0 is a special token.
PIECES = [
    b"",
    *(bytes([byte]) for byte in b"abcdef .\n"),
    *(prefix + b"\xc3" for prefix in (b"", b"a", b"b", b"c", b"d", b"e", b"f")),
    *(b"\xa9" + suffix for suffix in (b"", b"a", b"b", b"c", b"d", b"e", b"f")),
    *(b"\xe2\x82", b"a\xe2\x82", b"b\xe2\x82", b"\xe2", b"\x82\xac", b"\xac"),
    *(b"\xaca", b"\xacb", b"\xf0\x9f", b"\x98\x80"),
    *(text.encode() for text in ("é", "aé", "éa", "€", "a€b", "😀")),
    *(b"ab", b"ba", b"abc", b"cab", b"aa", b"bb", b"cc"),
]


def spelled(data):
    """Returns bytes as a byte-level tokenizer writes them: one visible character
    each."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return "".join(
        chr(byte if byte in visible else 256 + others.index(byte)) for byte in data
    )


def piece_tokenizer():
    vocab = {spelled(piece): i for i, piece in enumerate(PIECES) if piece}
    tokenizer = Tokenizer(models.BPE({"<|end|>": 0, **vocab}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def data_of(tokens):
    return b"".join(PIECES[token] for token in tokens)


def text_of(tokens):
    return data_of(tokens).decode("utf-8", "replace")


def expected_stop(tokens, strings, begin=0):
    """Returns kept tokens, text and stop string, from a search after every token."""
    for end in range(begin + 1, len(tokens) + 1):
        data = data_of(tokens[begin:end])
        found = [
            (data.find(string.encode()), -len(string.encode()), string)
            for string in strings
            if string.encode() in data
        ]
        if found:
            start, _, string = min(found)
            before = data_of(tokens[:begin]) + data[:start]
            return tokens[:end], before.decode("utf-8", "replace"), string
    return tokens, text_of(tokens), None


def across(tokens, size):
    """Returns substrings of a text that span tokens. Those with split characters are
    first."""
    text, found = text_of(tokens), []
    for start in range(len(text) - size + 1):
        string = text[start : start + size]
        kept, _, _ = expected_stop(tokens, [string])
        if "\ufffd" not in string and len(PIECES[kept[-1]]) < len(string.encode()) < 8:
            if 4 <= len(kept) < len(tokens):
                found.append((string.isascii(), string))
    return [string for _, string in sorted(set(found))]
