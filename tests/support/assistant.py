"""Tiny targets and assistants of transformers' classes of Gemma 4, and what the
assistants draft by transformers in float64."""

import copy
from functools import cache

import numpy as np
import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

from tests.support.hf_gemma4 import (
    FAR,
    INPUTS,
    K_IS_V,
    NEAR,
    PLAIN,
    gemma4,
    gemma4_moe,
    gemma4_unified,
    prepared,
)

VOCAB, WIDTH = 60, 32  # of the targets; the vocabulary divides into clusters
LAYERS = [NEAR, NEAR, FAR, NEAR, FAR]
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 20,
    "num_attention_heads": 6,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "intermediate_size": 24,
    "final_logit_softcapping": None,
    "rms_norm_eps": 0.03,  # not the target's
}
SHARED = {"num_kv_shared_layers": len(LAYERS)}
NO_INPUTS = dict.fromkeys(INPUTS, 0)
PLAIN_KIND = (Gemma4TextConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM)
UNIFIED_KIND = (
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)
CLUSTERS, READ = 12, 5
CLUSTERED = {
    "use_ordered_embeddings": True,
    "num_centroids": CLUSTERS,
    "centroid_intermediate_top_k": READ,
}
KINDS = {  # target, classes and fields of the assistant
    "shared": (gemma4, PLAIN_KIND, NO_INPUTS | SHARED, {}),
    "experts": (gemma4_moe, PLAIN_KIND, NO_INPUTS | K_IS_V, {}),
    "unified": (gemma4_unified, UNIFIED_KIND, K_IS_V | SHARED, {}),
    "clusters": (gemma4, PLAIN_KIND, NO_INPUTS | SHARED, CLUSTERED),
}


@cache
def models(kind):
    """Returns transformers' target and assistant. The assistant often agrees with the
    target, because both mostly pass on the embedding of the last token."""
    make, classes, text, fields = KINDS[kind]
    size = {"vocab_size": VOCAB}
    if kind in ("shared", "clusters"):
        size["vocab_size_per_layer_input"] = VOCAB
    target = make(**size).eval()
    config = classes[0](**PLAIN | SMALL | text)
    config = classes[1](text_config=config, backbone_hidden_size=WIDTH, **fields)
    assistant = prepared(classes[2](config)).eval()
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        table = target.get_input_embeddings().weight
        random = torch.randn(SMALL["hidden_size"], WIDTH, generator=rng)
        down = random / WIDTH**0.5
        assistant.model.embed_tokens.weight.copy_(table @ down.T)
        assistant.pre_projection.weight[:, :WIDTH] = 1.5 * down
        assistant.pre_projection.weight[:, WIDTH:] *= 0.5
        if fields:
            order = torch.randperm(VOCAB, generator=rng)
            assistant.masked_embedding.token_ordering.copy_(order)
    return target, assistant


@cache
def doubled(kind):
    return tuple(copy.deepcopy(model).double() for model in models(kind))


def saved(kind, folder):
    """Writes target and assistant into a folder. Returns their directories."""
    paths = folder / "target", folder / "assistant"
    for model, path in zip(models(kind), paths, strict=True):
        model.save_pretrained(path)
    return paths


@cache
def _seen(kind, text):
    """Returns transformers' last hidden state, and keys and values, of a text."""
    with torch.no_grad():
        out = doubled(kind)[0](
            torch.tensor([text]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
    return out.hidden_states[-1][:, -1:], out.shared_kv_states


def chain_logits(kind, text, chain):
    """Returns transformers' logits [len(chain), V] after each token of a chain of
    drafts, whose first token is the last of the text.

    The keys and values are those of the tokens before it. (In transformers' `generate`
    those of one rejected token may follow them.)
    """
    (target, assistant), found = doubled(kind), []
    handed, keys = _seen(kind, tuple(text[:-1]))
    with torch.no_grad():
        for token in chain:
            e = target.get_input_embeddings()(torch.tensor([[token]]))
            out = assistant(
                inputs_embeds=torch.cat([e, handed], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=keys,
                attention_mask=torch.ones(1, len(text)),
            )
            handed = out.last_hidden_state
            found.append(out.logits[0, 0].numpy())
    return np.array(found)


class Recomputed:
    """The drafts of an assistant by transformers."""

    def __init__(self, kind):
        self.kind = kind

    def tree(self, text, parents):
        """Returns the tokens of a tree: the k-th child of a node has its k-th best
        token."""
        paths, ranked, children = [[text[-1]]], {}, {}
        for parent in parents[1:]:
            if parent not in ranked:
                logits = chain_logits(self.kind, text, paths[parent])[-1]
                ranked[parent] = np.argsort(-logits)
            rank = children[parent] = children.get(parent, -1) + 1
            paths.append([*paths[parent], int(ranked[parent][rank])])
        return [path[-1] for path in paths]
