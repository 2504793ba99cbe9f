"""Random weights for tiny models of transformers' classes."""

import torch

VOCAB = 61
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def randomize(model, seed=0):
    """Gives every parameter values with which mistakes change the logits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(p):
        return torch.randn(p.shape, generator=generator, dtype=p.dtype)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.log(8 * normal(p).abs() + 0.5))
            elif name.endswith(("dt_bias", ".D")):
                p.copy_(normal(p))
            elif p.ndim == 1 and "norm" in name:
                p.copy_(1 + 0.3 * normal(p))
            elif p.ndim == 1:
                p.copy_(0.3 * normal(p))
            else:
                p.copy_(normal(p) * p.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.5 * normal(buffer))
    return model.eval()


def randomize_offset(model):
    """Randomizes a model whose norms, except those of Gated DeltaNet, store scale - 1.

    The scales have few bits, so that adding 1 and subtracting it gives them back.
    Decays are slow enough that the state matters after many tokens.
    """
    randomize(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.log(p.exp() / 4))
            elif p.ndim == 1 and "norm" in name and "linear_attn" not in name:
                p.copy_(torch.round(256 * (p - 1)) / 256)
    return model


def slower(model):
    """Returns a randomized model with slower decays. A state that forgets at once is
    nearly 0 where query and key are orthogonal, and its norm then amplifies
    rounding."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.sub_(3.0)
    return model
