"""The losses of language models, in nats per token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stree_jax.models import (
    Model,
    chain_nodes,
    forward_hidden,
    init_state,
    logits_of,
    mtp_model,
    param_dtype,
)

# (model, windows [B, T+1], teacher or None) -> a scalar.
Loss = Callable[[Model, jax.Array, Model | None], jax.Array]

MTP_WEIGHT = 0.3  # of the MTP layers' loss, as in most of DeepSeek-V3's training


def sequence_hidden(
    model: Model, tokens: jax.Array, previous: jax.Array | None = None
) -> jax.Array:
    """Returns the hidden states [B, T, d] float32 of whole sequences [B, T], each from
    an empty state.

    Args:
      model: the model.
      tokens: [B, T] int32.
      previous: [B, T, d] float32, only for MTP layers, see `models.forward_tapped`.
    """
    batch, T = tokens.shape
    config = model.config
    state = init_state(config, batch, 1, param_dtype(model.params))
    nodes = chain_nodes(batch, T, config.conv_taps)
    hidden, _, _ = forward_hidden(model, state, tokens, nodes, previous=previous)
    return hidden


def sequence_logits(model: Model, tokens: jax.Array) -> jax.Array:
    """Returns the logits [B, T, V] float32 of whole sequences [B, T], each from an
    empty state."""
    return logits_of(model, sequence_hidden(model, tokens))


def next_token_loss(
    model: Model, windows: jax.Array, teacher: Model | None = None
) -> jax.Array:
    """Returns the mean cross-entropy of windows [B, T+1], in nats per token. The
    teacher is not used."""
    return _cross_entropy(sequence_logits(model, windows[:, :-1]), windows[:, 1:])


def with_mtp_loss(
    model: Model, windows: jax.Array, teacher: Model | None = None
) -> jax.Array:
    """Returns `next_token_loss` plus `MTP_WEIGHT` times that of the MTP layers, which
    predict the token after the next one (DeepSeek-V3 2024, section 2.2).

    An MTP layer reads a token and the hidden state that predicted it. Both losses train
    all layers that they depend on.
    """
    hidden = sequence_hidden(model, windows[:, :-1])
    loss = _cross_entropy(logits_of(model, hidden), windows[:, 1:])
    mtp = mtp_model(model)
    further = sequence_hidden(mtp, windows[:, 1:-1], hidden[:, :-1])
    return loss + MTP_WEIGHT * _cross_entropy(logits_of(mtp, further), windows[:, 2:])


def _cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    import optax

    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return losses.mean()


def distillation_loss(
    model: Model, windows: jax.Array, teacher: Model | None
) -> jax.Array:
    """Returns the mean KL(teacher || model) over windows [B, T+1], in nats per
    token."""
    if teacher is None:
        raise ValueError("teacher: distillation needs a teacher, got None")
    tokens = windows[:, :-1]
    p = jax.nn.log_softmax(jax.lax.stop_gradient(sequence_logits(teacher, tokens)))
    q = jax.nn.log_softmax(sequence_logits(model, tokens))
    return (jnp.exp(p) * (p - q)).sum(axis=-1).mean()
