"""Checkpoint families: one file each, with its fields and names both ways."""

from stree_jax.convert.families import (
    bamba,
    falcon_h1,
    granite,
    llama,
    mamba2,
    mambainllama,
    native,
    nemotron_h,
    zamba2,
)
from stree_jax.convert.families.family import Family

FAMILIES = (  # in the order of the README's table
    native.FAMILY,
    mamba2.FAMILY,
    llama.FAMILY,
    granite.FAMILY,
    nemotron_h.FAMILY,
    falcon_h1.FAMILY,
    bamba.FAMILY,
    zamba2.FAMILY,
    mambainllama.FAMILY,
)
FORMATS: dict[str, Family] = {
    family.format: family for family in (*FAMILIES, mamba2.SINGULAR_FAMILY)
}
