"""Multi-token prediction (MTP): a model's own extra layers as its draft model."""

from dataclasses import replace

from stree_jax.models.stack.model import Model

# Parameters of `mtp_model`. All but "mtp" are the target's embedding and head.
PARAMS = ("embedding", "lm_head", "head_ids", "mtp")


def mtp_model(target: Model) -> Model:
    """Returns the MTP layers of a target model as a model, with its embedding and head.

    State, records and commits work as for any model with these layers. Its forward
    passes (`forward_hidden`, `extend`) also take `previous`, the hidden state that
    predicted each token: the target's for a committed token, the MTP layers' own for a
    draft token. Positions count from the first token that the MTP layers read, which is
    the second token of the text.

    Raises:
      ValueError: the target has no MTP layers.
    """
    config = target.config
    if not config.mtp:
        raise ValueError("model: has no MTP layers; load it with mtp=True")
    params = {name: target.params[name] for name in PARAMS if name in target.params}
    return replace(target, params=params, config=replace(config, layers=config.mtp))


def without_mtp(model: Model) -> Model:
    """Returns the model without its MTP layers. No arrays are copied."""
    params = {name: leaf for name, leaf in model.params.items() if name != "mtp"}
    return replace(model, params=params, config=replace(model.config, mtp=()))
