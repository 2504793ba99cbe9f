"""Small llama models as quantized GGUF files, with several storage types in a file."""

import gguf
import numpy as np

D, HEADS, KV, HIDDEN, LAYERS, VOCAB = 128, 8, 4, 256, 2, 320
KINDS = {"token_embd": "Q8_0", "attn_v": "Q5_1", "ffn_down": "Q8_0"}


def write_llama(file, kinds=None, usual="Q4_0", tokens=None, seed=0, near=None):
    """Writes a model with random weights.

    Args:
      kinds: storage type by the name of a tensor. If None, `KINDS`.
      usual: storage type of all other matrices.
      tokens: function of the writer that adds a vocabulary of `VOCAB` tokens.
      seed: of the weights.
      near: seed of a small disturbance of the weights, or None.
    """
    kinds = KINDS if kinds is None else kinds
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(4096)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    if tokens is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        tokens(writer)
    rng, noise = np.random.default_rng(seed), np.random.default_rng(near)
    for name, shape in _shapes():
        scale = 0.1 if len(shape) == 2 else 0.3
        values = scale * rng.standard_normal(shape)
        if near is not None:
            values += 0.02 * scale * noise.standard_normal(shape)
        values = (values + (len(shape) == 1)).astype(np.float32)
        words = [word for word in kinds if word in name]
        kind = "F32" if len(shape) == 1 else kinds[words[0]] if words else usual
        stored = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(values, stored)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _shapes():
    yield "token_embd", (VOCAB, D)
    yield "output_norm", (D,)
    narrow = KV * D // HEADS
    for i in range(LAYERS):
        yield f"blk.{i}.attn_norm", (D,)
        for part, rows in (("q", D), ("k", narrow), ("v", narrow), ("output", D)):
            yield f"blk.{i}.attn_{part}", (rows, D)
        yield f"blk.{i}.ffn_norm", (D,)
        for part in ("gate", "up"):
            yield f"blk.{i}.ffn_{part}", (HIDDEN, D)
        yield f"blk.{i}.ffn_down", (D, HIDDEN)
