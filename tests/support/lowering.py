"""Lowering of programs for platforms that are not available."""

import jax


def lowered(function, args, platform):
    """Returns the text of a program lowered for a platform, available or not."""
    jitted = jax.jit(function)
    version = tuple(map(int, jax.__version__.split(".")[:2]))
    if platform == "cpu" or version < (0, 11):
        return jitted.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    abstract = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=None, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        return jitted.trace(*args).lower(lowering_platforms=(platform,)).as_text()
