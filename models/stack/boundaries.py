"""Maps the layers that makers of models count to the residual layers of a config.

Published drafters name places in the target's residual stream as boundaries: boundary b
is the stream after b of the maker's layers. For most families one such layer is two of
ours, a token mixer and an MLP. For Gemma 4 with per-layer inputs it is three.
"""

from stree_jax.models.stack.config import ModelConfig, token_mixers


def layers_per_boundary(config: ModelConfig) -> int:
    """Returns the number of residual layers in a layer of the maker's count.

    It is 2 if token mixers and MLPs take turns from the first layer to the last, 3 if
    two layers without a token mixer follow each of those with one, else 1 (Nemotron-H,
    where layers of both kinds follow each other in any order).
    """
    mixes = [bool(token_mixers(config, block)) for block in config.layers]
    for count in (2, 3):
        turn = [True, *[False] * (count - 1)]
        if mixes == turn * (len(mixes) // count):
            return count
    return 1


def boundary_count(config: ModelConfig) -> int:
    """Returns the number of the maker's layers, which is the last boundary."""
    return len(config.layers) // layers_per_boundary(config)


def tap_of(config: ModelConfig, boundary: int) -> int:
    """Returns the tap, as in `Drafter.taps`, of a boundary.

    Raises:
      ValueError: the model has no such boundary.
    """
    most = boundary_count(config)
    if not 0 <= boundary <= most:
        raise ValueError(
            f"taps: the drafter reads the target after layer {boundary}, but the "
            f"target has {most} layers; use the model that it was trained on"
        )
    return boundary * layers_per_boundary(config) - 1


def moved_boundaries(
    boundaries: tuple[int, ...], config: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Returns the boundaries as they would be if a drafter's config counted from the
    other end of a layer, by a description. Lists that the model does not have are left
    out."""
    steps, most = (
        {"one layer earlier": -1, "one layer later": 1},
        boundary_count(config),
    )
    moved = {name: tuple(b + n for b in boundaries) for name, n in steps.items()}
    return {
        name: found
        for name, found in moved.items()
        if found and 0 <= min(found) and max(found) <= most
    }
