"""Multi-token prediction: the layers of a model that draft for it, as a model."""

from dataclasses import replace

from stree_jax.models.model import Model, derived

PARAMS = ("embedding", "lm_head", "mtp")  # the first two are the target's own arrays


def mtp_model(target: Model) -> Model:
    """The MTP layers of a target, with its embedding and its head.

    Its state, records and commits are those of any model with these layers. Its passes
    (`forward_hidden`, `extend`) read `previous` beside the tokens: at a token of the
    text, the target's hidden state that chose it; at a token that was drafted, its own
    hidden state that did. Positions are counted from the first token that it reads,
    which is the second of the text.

    Raises:
      ValueError: the target has none.
    """
    config = target.config
    if not config.mtp:
        raise ValueError("model: it has no MTP layers; load it with mtp=True")
    params = {name: target.params[name] for name in PARAMS if name in target.params}
    return derived(target, params, replace(config, layers=config.mtp))


def without_mtp(model: Model) -> Model:
    """The model that the MTP layers draft for; its arrays are not copied."""
    params = {name: leaf for name, leaf in model.params.items() if name != "mtp"}
    return derived(model, params, replace(model.config, mtp=()))
