"""Directories and GGUF files laid out as published, with tiny weights.

File lists, config fields, special tokens and chat templates follow the repositories of
these names on the Hugging Face hub. Sizes and weights are made up.
"""

import json
from functools import partial

import gguf
import torch
from tokenizers import AddedToken
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.support import hf_checkpoints, qwen
from tests.support.gguf_files import describe, layout
from tests.support.hf_checkpoints import (
    NEMOTRON_MOE,
    granite,
    nemotron,
    qwen3_5_multimodal,
    randomize,
)
from tests.support.table_models import spm
from tests.support.vocabularies import byte_level

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GRANITE = (
    "{%- for message in messages %}{{ '<|start_of_role|>' + message['role'] + "
    "'<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}"
    "{%- endif %}"
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DENSE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
}


def write_json(file, values):
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")


def change_config(path, **fields):
    """Replaces fields of config.json, with the spelling of older exporters."""
    file = path / "config.json"
    values = json.loads(file.read_text())
    parameters = values.pop("rope_parameters", None) or {}
    values["rope_theta"] = parameters.get("rope_theta", 10000.0)
    values["torch_dtype"] = values.pop("dtype", "float32")
    write_json(file, values | fields)


def add_other_files(path, *names):
    """Adds files that repositories have and that no loader reads."""
    for name in (".gitattributes", "README.md", "LICENSE", *names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"not a weight, nor JSON")


def added_tokens(tokenizer):
    """Returns the `added_tokens_decoder` of a tokenizer_config.json."""
    return {
        str(number): {"content": token.content, "special": token.special}
        | dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }


def chatml_tokenizer(pre, eos="<|im_end|>"):
    tokenizer = byte_level(pre)
    settings = {
        "add_prefix_space": False,
        "added_tokens_decoder": added_tokens(tokenizer),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    return tokenizer, settings


def save_tokenizer(path, tokenizer, settings):
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", settings)
    model = json.loads(tokenizer.to_str())["model"]
    write_json(path / "vocab.json", model["vocab"])
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")


def qwen2(path):
    """Writes Qwen2.5-0.5B-Instruct: tied, a padded embedding, two stop tokens."""
    tokenizer, settings = chatml_tokenizer("qwen2")
    end, turn = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    vocab = 432  # rows of the embedding; the tokenizer has fewer tokens
    config = Qwen2Config(**DENSE, vocab_size=vocab, tie_word_embeddings=True)
    randomize(Qwen2ForCausalLM(config)).save_pretrained(path)
    change_config(
        path,
        architectures=["Qwen2ForCausalLM"],
        bos_token_id=end,
        eos_token_id=turn,
        max_position_embeddings=32768,
        max_window_layers=21,
        sliding_window=32768,
        use_sliding_window=False,
    )
    sampling = {"do_sample": True, "repetition_penalty": 1.1, "temperature": 0.7}
    ids = {"bos_token_id": end, "pad_token_id": end, "eos_token_id": [turn, end]}
    write_json(path / "generation_config.json", ids | sampling | {"top_p": 0.8})
    save_tokenizer(path, tokenizer, settings)
    add_other_files(path)


def mistral(path):
    """Writes Mistral-7B-Instruct-v0.3: shards, consolidated.safetensors,
    SentencePiece."""
    tokenizer = spm()
    inst = [
        AddedToken(t, special=True, normalized=False) for t in ("[INST]", "[/INST]")
    ]
    tokenizer.add_special_tokens(inst)
    vocab = tokenizer.get_vocab_size()
    config = MistralConfig(**DENSE, vocab_size=vocab, sliding_window=None)
    model = randomize(MistralForCausalLM(config))
    model.save_pretrained(path, max_shard_size="20KB")
    change_config(path, sliding_window=None, bos_token_id=1, eos_token_id=2)
    write_json(
        path / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
    )
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added_tokens(tokenizer),
        "bos_token": "<s>",
        "chat_template": INSTRUCT,
        "eos_token": "</s>",
        "legacy": False,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": None,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    }
    save_tokenizer(path, tokenizer, settings)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(path / "special_tokens_map.json", special)
    add_other_files(
        path, "consolidated.safetensors", "params.json", "tokenizer.model.v3"
    )


def smollm2(path):
    """Writes SmolLM2-135M-Instruct: a tied llama in bfloat16, and files of other
    tools."""
    tokenizer, settings = chatml_tokenizer("smollm")
    start, turn = (tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    vocab = tokenizer.get_vocab_size()
    config = LlamaConfig(**DENSE, vocab_size=vocab, tie_word_embeddings=True)
    model = randomize(LlamaForCausalLM(config)).to(torch.bfloat16)
    model.save_pretrained(path)
    change_config(
        path,
        bos_token_id=start,
        eos_token_id=turn,
        pad_token_id=turn,
        is_llama_config=True,
        rope_interleaved=False,
        rope_scaling=None,
    )
    ids = {"bos_token_id": start, "eos_token_id": turn, "pad_token_id": turn}
    write_json(path / "generation_config.json", ids)
    settings |= {"bos_token": "<|im_start|>", "tokenizer_class": "GPT2Tokenizer"}
    save_tokenizer(path, tokenizer, settings)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write_json(path / "special_tokens_map.json", names)
    add_other_files(
        path, "onnx/model.onnx", "runs/events.out.tfevents.1", "training_args.bin"
    )


def granite_hybrid(path):
    """Writes Granite-4.0-H-Micro: shards, and the template in a separate file."""
    tokenizer = byte_level("refact")
    roles = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>")
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in roles]
    )
    end = tokenizer.token_to_id("<|end_of_text|>")
    model = granite(
        vocab_size=tokenizer.get_vocab_size() + 5,
        attention_bias=False,
        position_embedding_type="nope",
        mamba_proj_bias=False,
        mamba_conv_bias=True,
        mamba_n_groups=1,
    )
    model.save_pretrained(path, max_shard_size="20KB")
    change_config(path, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    write_json(path / "generation_config.json", {"eos_token_id": end})
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added_tokens(tokenizer),
        "bos_token": "<|end_of_text|>",
        "eos_token": "<|end_of_text|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<|endoftext|>",
    }
    save_tokenizer(path, tokenizer, settings)
    (path / "chat_template.jinja").write_text(GRANITE)
    write_json(path / "added_tokens.json", {t: tokenizer.token_to_id(t) for t in roles})
    add_other_files(path)


def nemotron_nano(path):
    """Writes Nemotron-3-Nano-30B-A3B: experts, Python code, two stop tokens."""
    tokenizer, settings = chatml_tokenizer("llama-bpe", eos="<|im_end|>")
    end, turn = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    model = nemotron(vocab_size=tokenizer.get_vocab_size(), **NEMOTRON_MOE)
    model.save_pretrained(path, max_shard_size="40KB")
    auto = {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}
    change_config(path, eos_token_id=end, auto_map=auto)
    (path / "modeling_nemotron_h.py").write_text("raise SystemExit('was run')\n")
    write_json(path / "generation_config.json", {"eos_token_id": [end, turn]})
    settings.pop("chat_template")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    save_tokenizer(path, tokenizer, settings)
    (path / "chat_template.jinja").write_text(CHATML)
    add_other_files(path, "bias.md", "privacy.md", "nano_v3_reasoning_parser.py")


def qwen3_5(path, experts=False, tied=False, fused=()):
    """Writes a multimodal Qwen3.5: a language model with MTP layers, and a vision
    encoder.

    Args:
      path: the new directory.
      experts: True for experts instead of MLPs.
      tied: True if the head is the embedding.
      fused: prefixes of the tensors whose experts are stored as one tensor.
    """
    tokenizer, settings = chatml_tokenizer("qwen2")
    end, turn = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    text = {"vocab_size": 432, "eos_token_id": end, "rms_norm_eps": 1e-2}
    qwen3_5_multimodal(experts, tied, **text).save_pretrained(path)
    qwen.with_mtp(path)
    for prefix in fused:
        qwen.fuse_experts(path, prefix)
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"]
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    text |= {"full_attention_interval": 4, "mtp_use_dedicated_embeddings": False}
    config |= {"image_token_id": 430, "video_token_id": 431}
    write_json(path / "config.json", config)
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    ids = {"bos_token_id": end, "pad_token_id": end, "eos_token_id": [turn, end]}
    write_json(path / "generation_config.json", ids | sampling)
    settings.pop("chat_template")
    save_tokenizer(path, tokenizer, settings)
    (path / "chat_template.jinja").write_text(CHATML)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        write_json(path / name, {"patch_size": 4})
    add_other_files(path)


def qwen3_next(path):
    """Writes Qwen3-Next-80B-A3B-Instruct: MTP layers that the config does not
    mention."""
    tokenizer, settings = chatml_tokenizer("qwen2")
    end, turn = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    vocab = tokenizer.get_vocab_size()
    options = {"vocab_size": vocab, "mlp_only_layers": [], "rms_norm_eps": 1e-2}
    hf_checkpoints.qwen3_next(**options).save_pretrained(path)
    qwen.with_mtp(path)
    config = json.loads((path / "config.json").read_text())
    share = config["rope_parameters"]["partial_rotary_factor"]
    for name in ("layer_types", "mtp_num_hidden_layers"):
        del config[name]
    write_json(path / "config.json", config)
    older = {"partial_rotary_factor": share, "full_attention_interval": 4}
    change_config(path, **older, rope_scaling=None, use_sliding_window=False)
    change_config(path, bos_token_id=end, eos_token_id=turn, rope_theta=700.0)
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    ids = {"bos_token_id": end, "pad_token_id": end, "eos_token_id": [turn, end]}
    write_json(path / "generation_config.json", ids | sampling)
    save_tokenizer(path, tokenizer, settings)
    add_other_files(path)


def lfm2(path):
    """Writes LFM2-350M."""
    tokenizer, settings = chatml_tokenizer("llama-bpe")
    config = Lfm2Config(
        **{k: v for k, v in DENSE.items() if k != "rms_norm_eps"},
        vocab_size=tokenizer.get_vocab_size(),
        layer_types=["conv", "full_attention"],
    )
    Lfm2ForCausalLM(config).save_pretrained(path)
    save_tokenizer(path, tokenizer, settings)
    add_other_files(path)


DIRECTORIES = {
    "Qwen2.5-0.5B-Instruct": qwen2,
    "Mistral-7B-Instruct-v0.3": mistral,
    "SmolLM2-135M-Instruct": smollm2,
    "granite-4.0-h-micro": granite_hybrid,
    "NVIDIA-Nemotron-3-Nano-30B-A3B": nemotron_nano,
    "Qwen3.5-0.8B": partial(qwen3_5, tied=True),
    "Qwen3.5-9B": qwen3_5,
    "Qwen3.5-35B-A3B": partial(qwen3_5, experts=True, fused=("model.",)),
    "Qwen3.6-35B-A3B": partial(qwen3_5, experts=True, fused=("model.", "mtp.")),
    "Qwen3-Next-80B-A3B-Instruct": qwen3_next,
    "LFM2-350M": lfm2,
}


def write_gguf(directory, arch, file, kind="F32"):
    """Writes a directory of `DIRECTORIES` as llama.cpp's converter would."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    template = directory / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text()
    writer = gguf.GGUFWriter(file, arch)
    describe(writer, arch, config)
    writer.add_name(directory.name)
    write_vocabulary(writer, directory, settings, config["vocab_size"])
    tensors = {}
    for shard in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(shard)
    stored = gguf.GGMLQuantizationType[kind]
    for name, values in layout(arch, config, tensors):
        matrix = values.ndim > 1 and "ssm_" not in name
        how = stored if matrix else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values.copy(), how)
        writer.add_tensor(name, data, raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PRE = {"qwen2": "qwen2", "llama": "smollm", "granitehybrid": "refact"}


def write_vocabulary(writer, directory, settings, rows):
    whole = json.loads((directory / "tokenizer.json").read_text())
    ids = dict(whole["model"]["vocab"])
    special = {t["content"]: t["special"] for t in whole["added_tokens"]}
    ids |= {t["content"]: t["id"] for t in whole["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    kinds = gguf.TokenType
    kind = {t: kinds.CONTROL if s else kinds.USER_DEFINED for t, s in special.items()}
    padding = [f"[PAD{i}]" for i in range(len(tokens), rows)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE[writer.arch])
    writer.add_token_list([*tokens, *padding])
    types = [kind.get(t, kinds.NORMAL) for t in tokens]
    writer.add_token_types([*types, *[kinds.UNUSED] * len(padding)])
    merges = whole["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_chat_template(settings["chat_template"])


GGUF_FILES = {
    "qwen2.5-0.5b-instruct-q8_0.gguf": ("Qwen2.5-0.5B-Instruct", "qwen2", "Q8_0"),
    "SmolLM2-135M-Instruct-f16.gguf": ("SmolLM2-135M-Instruct", "llama", "F16"),
    "granite-4.0-h-micro-bf16.gguf": ("granite-4.0-h-micro", "granitehybrid", "BF16"),
}
