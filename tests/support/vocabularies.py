"""Tiny trained tokenizers, and their GGUF form as written by llama.cpp's converter."""

import json

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    SentencePieceBPETokenizer,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

TEXTS = (
    "The quick brown fox doesn't jump over 12345 lazy dogs; it's 3.14 o'clock!",
    "Der schnelle Fuchs springt über 67 faule Hunde — und schläft dann.",
    "def f(x):\n    return x ** 2  # squares\n\n\n\tprint(f(10_000))",
    "素早い茶色の狐は、のろまな犬を飛び越える。 Быстрая лиса прыгает. 🦊🦊",
    "  spaces   in   rows\r\nand\ttabs, WE'LL see I'M sure/",
)
# Not in the training text: other scripts and digits, and a decomposed accent.
UNSEEN = (
    *TEXTS,
    "¿Qué tal? नमस्ते दुनिया, 안녕하세요 1234567890 و٣٤٥",
    "e\u0301 tre\u0300s\u00a0bien ½ ²³ №5",
    "<|im_start|>user\nhi<|im_end|>\n \u2581odd",
    "",
    " ",
    "\n",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPACE = "\u2581"  # used by sentencepiece
PLAIN = "<fim>"  # an added token that is not special

COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "mpt", "olmo", "command-r")
BYTES = {"add_prefix_space": False, "use_regex": False}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters of words in deepseek-llm's tokenizer.json, as ranges of hexadecimal numbers.
LETTERS = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377
37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5
13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15
1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4
1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4
1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134
2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3
a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17
ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2
118a0-118df 1e900-1e943
"""
RANGES = [[int(end, 16) for end in word.split("-")] for word in LETTERS.split()]
CASED = "".join(f"{chr(ends[0])}-{chr(ends[-1])}" for ends in RANGES)
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


def split(*expressions):
    cuts = [pre_tokenizers.Split(Regex(e), "isolated") for e in expressions]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(**BYTES)])


def words(pre):
    """Returns the pre-tokenizer of tokenizer.json files with this GGUF name."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    match pre:
        case "gpt-2" | "olmo" | "mpt":
            return plain
        case "smollm" | "starcoder" | "refact" | "command-r":
            return pre_tokenizers.Sequence([digits, plain])
        case "falcon":
            marks = pre_tokenizers.Punctuation("contiguous")
            numbers = pre_tokenizers.Digits(individual_digits=False)
            threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
            return pre_tokenizers.Sequence([marks, plain, numbers, threes])
        case "deepseek-llm":
            marks = (rf"\s?{MARKS}", r"\s+$")
            words = rf"\s?[{CASED}]+"
            return split("[\r\n]", words, *marks, EAST_ASIAN, r"\p{N}")
        case "deepseek-coder":
            return split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}")
        case "llama-bpe" | "dbrx" | "falcon-h1":
            return split(LLAMA3)
        case "qwen2":
            return split(LLAMA3.replace("{1,3}", ""))
        case "qwen35":
            return split(PRETOKENIZE_REGEX)
    raise ValueError(pre)


def byte_level(pre):
    """Returns a trained tokenizer of 400 tokens, as in its tokenizer.json."""
    whole = pre in ("llama-bpe", "falcon-h1")
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = words(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(PLAIN, normalized=False)])
    return tokenizer


def write_byte_level(tokenizer, pre, template=None, **flags):
    """Returns a function of a GGUF writer, for `gguf_files.write_gguf`.

    Args:
      flags: boolean keys such as `add_bos_token`.
    """
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL)
    special[PLAIN] = gguf.TokenType.USER_DEFINED

    def write(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, "[PAD401]"])
        kinds = [special.get(t, gguf.TokenType.NORMAL) for t in tokens]
        writer.add_token_types([*kinds, gguf.TokenType.UNUSED])
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_pad_token_id(2)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        if template is not None:
            writer.add_chat_template(template)

    return write


BYTE_TOKENS = [f"<0x{b:02X}>" for b in range(256)]


def _trained_pieces():
    trained = SentencePieceBPETokenizer()
    options = {"vocab_size": 300, "show_progress": False, "special_tokens": ["<unk>"]}
    trained.train_from_iterator(TEXTS, **options)
    return trained


def pieces():
    """Returns tokens and scores of a trained SentencePiece vocabulary."""
    known = _trained_pieces().get_vocab()
    found = [t for t in sorted(known, key=known.get) if t != "<unk>"]
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *found]
    return tokens, [0.0] * 259 + [-float(i) for i in range(len(found))]


def piece_merges():
    """Returns the merges of the vocabulary `pieces`, as in files of Gemma 4."""
    merges = json.loads(_trained_pieces().to_str())["model"]["merges"]
    return [" ".join(pair) for pair in merges]


def write_pieces(tokens, scores, merges=None, **flags):
    """Does the same as `write_byte_level` for a SentencePiece vocabulary; with
    `merges`, for one whose merges the file lists."""
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    types += [kinds.NORMAL] * (len(tokens) - 259)

    def write(writer):
        writer.add_tokenizer_model("llama" if merges is None else "gemma4")
        if merges is not None:
            writer.add_token_merges(merges)
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return write


def piece_ids(text, tokens, scores, prefix=True):
    """Returns the ids of a text by the definition of sentencepiece's BPE.

    The two neighbours that form the token with the best score are merged, again and
    again, the leftmost first.
    """
    number = {token: i for i, token in enumerate(tokens)}
    mergeable = set(tokens[259:])
    symbols = list((" " * (prefix and text != "") + text).replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[number[a + b]], i)
            for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in mergeable
        ]
        if not pairs:
            break
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids = []
    for symbol in symbols:
        if symbol in number:
            ids.append(number[symbol])
        else:
            ids += [3 + byte for byte in symbol.encode()]
    return ids
