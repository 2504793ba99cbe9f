"""Tiny checkpoints whose greedy text is known by hand.

`weights(V, chain=chain)` makes a llama that continues token t with chain[t] forever:
embeddings are one-hot, attention and MLP are zero, and the output matrix has a one
where chain[t] meets t. `byte_level` and `spm` make tokenizers of the two common kinds,
and `write_gguf` writes the same model as a GGUF file. Nothing here uses `stree_jax`.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
SPACE = "\u2581"  # SentencePiece's mark for a space
D_HIDDEN = 64


def weights(V, *, seed=0, d=32, layers=2, head=True, chain=None, also=()):
    """Returns the tensors of a llama by name. They are random, or follow `chain`.

    Args:
      V: rows of the embedding.
      d: width of the model. With `chain` it is V, which must be a multiple of 16.
      head: whether there is an lm_head.weight.
      chain: list of V token ids. After t, the logit of chain[t] is sqrt(V), others are
        0.
      also: triples (t, b, w). After t, the logit of token b is w sqrt(V).
    """
    rng = np.random.default_rng(seed)
    d = d if chain is None else V

    def tensor(*shape):
        if chain is not None:
            return np.zeros(shape, np.float32)
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    found = {"model.embed_tokens.weight": tensor(V, d)}
    found["model.norm.weight"] = np.ones(d, np.float32)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = np.ones(d, np.float32)
        for name in "qkvo":
            found[f"{layer}self_attn.{name}_proj.weight"] = tensor(d, d)
        found[f"{layer}mlp.gate_proj.weight"] = tensor(D_HIDDEN, d)
        found[f"{layer}mlp.up_proj.weight"] = tensor(D_HIDDEN, d)
        found[f"{layer}mlp.down_proj.weight"] = tensor(d, D_HIDDEN)
    if head:
        found["lm_head.weight"] = tensor(V, d)
    if chain is not None:
        found["model.embed_tokens.weight"] = np.eye(V, dtype=np.float32)
        found["lm_head.weight"][np.asarray(chain), np.arange(V)] = 1
        for token, other, weight in also:
            found["lm_head.weight"][other, token] = weight
    return found


def write_llama(path, V, *, tensors=None, tokenizer=None, config=None, **options):
    """Writes a llama directory and returns its path.

    Args:
      tensors: by name. If None, `weights(V, **options)`.
      tokenizer: saved as tokenizer.json, if given.
      config: fields of config.json to add or replace.
    """
    path = Path(path)
    path.mkdir(parents=True)
    tensors = weights(V, **options) if tensors is None else tensors
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,
        "hidden_size": tensors["model.norm.weight"].size,
        "intermediate_size": D_HIDDEN,
        "num_hidden_layers": sum(n.endswith("q_proj.weight") for n in tensors),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(fields | (config or {})))
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def byte_level(special=SPECIAL, more=()):
    """Returns a byte-level BPE with one merge. Its tokens: special, "ab", the 256
    bytes, more."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, "ab", *letters, *more]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    options = {"add_prefix_space": False, "use_regex": False}
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, special)
    return tokenizer


def spm(words=(f"{SPACE}Hello", f"{SPACE}world", f"{SPACE}again")):
    """Returns a tokenizer as converted from a SentencePiece model.

    Its tokens: <unk> <s> </s>, 256 byte tokens, single characters, then the words and
    the prefixes that they are merged from.
    """
    special = ("<unk>", "<s>", "</s>")
    names = [*special, *[f"<0x{byte:02X}>" for byte in range(256)], SPACE]
    merges = []
    for word in words:
        names += [char for char in dict.fromkeys(word) if char not in names]
        for n in range(2, len(word) + 1):
            if word[:n] not in names:
                names.append(word[:n])
                merges.append((word[: n - 1], word[n - 1]))
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add_special(tokenizer, special)
    return tokenizer


def _add_special(tokenizer, names):
    added = [AddedToken(name, special=True, normalized=False) for name in names]
    tokenizer.add_special_tokens(added)


def padded_size(tokenizer):
    """Returns the size of the vocabulary, rounded up to a multiple of 16."""
    return -(-(max(tokenizer.get_vocab().values()) + 1) // 16) * 16


def follow(tokenizer, names, V=None, rest=0):
    """Returns a chain in which each token is followed by the next of `names`.

    Args:
      names: token names or ids.
      rest: the token that follows all others.
    """
    ids = [tokenizer.token_to_id(n) if isinstance(n, str) else n for n in names]
    assert None not in ids, names
    chain = [rest] * (V or padded_size(tokenizer))
    for token, after in zip(ids, ids[1:], strict=False):
        chain[token] = after
    return chain


NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
NAMES["lm_head"] = "output"
BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path, tokenizer, chain, *, eos, kinds=None, pre="smollm", scores=None, edit=None
):
    """Writes a GGUF file of architecture llama and returns its path.

    Args:
      kinds: GGUF token types by name. The default is NORMAL, or UNUSED for padding.
      scores: one per token, for a SentencePiece vocabulary. If None, it is byte-level
        BPE.
      edit: called with the `gguf.GGUFWriter` before anything is written.
    """
    V, kinds = len(chain), kinds or {}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(V)
    writer.add_feed_forward_length(D_HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(V // 4)
    writer.add_rope_freq_base(10000.0)
    vocab = tokenizer.get_vocab()
    names = sorted(vocab, key=vocab.get)
    padding = [f"[PAD{i}]" for i in range(len(names), V)]
    usual = dict.fromkeys(padding, gguf.TokenType.UNUSED)
    if scores is None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([*scores, *[0.0] * len(padding)])
    writer.add_token_list([*names, *padding])
    types = [(usual | kinds).get(n, gguf.TokenType.NORMAL) for n in [*names, *padding]]
    writer.add_token_types(types)
    if scores is None:
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.token_to_id(eos))
    if edit is not None:
        edit(writer)
    for name, tensor in weights(V, chain=chain).items():
        name = name.removesuffix(".weight")
        if name.startswith("model.layers."):
            _, _, i, rest = name.split(".", 3)
            writer.add_tensor(f"blk.{i}.{BLOCK[rest]}.weight", tensor)
        else:
            writer.add_tensor(f"{NAMES[name]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
