"""Turns logits into the distribution from which each row's tokens are drawn."""

from stree_jax.sampling.settings import Sampling as Sampling
from stree_jax.sampling.settings import SamplingRows as SamplingRows
from stree_jax.sampling.settings import sampling_arrays as sampling_arrays
from stree_jax.sampling.settings import sampling_rows as sampling_rows
