"""Multi-token prediction (MTP): the layers of a model that draft for it."""

from dataclasses import replace

from stree_jax.models.model import Model, derived

PARAMS = ("embedding", "lm_head", "mtp")  # the first two are the target's own arrays


def mtp_model(target: Model) -> Model:
    """Returns the MTP layers of a target as a model, with its embedding and its head.

    State, records and commits are those of any model with these layers. Its passes
    (`forward_hidden`, `extend`) take `previous` beside the tokens: for a token of the
    text the target's hidden state that predicted it, for a draft token the MTP layers'
    own hidden state that did. Positions count from the first token that they read,
    which is the second of the text.

    Raises:
      ValueError: the target has no MTP layers.
    """
    config = target.config
    if not config.mtp:
        raise ValueError("model: it has no MTP layers; load it with mtp=True")
    params = {name: target.params[name] for name in PARAMS if name in target.params}
    return derived(target, params, replace(config, layers=config.mtp))


def without_mtp(model: Model) -> Model:
    """Returns the model without its MTP layers; arrays are not copied."""
    params = {name: leaf for name, leaf in model.params.items() if name != "mtp"}
    return derived(model, params, replace(model.config, mtp=()))
