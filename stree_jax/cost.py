"""The public functions of the cost model: times of passes, expected acceptance lengths
of trees, and the ranks that a drafter gives to tokens."""

from stree_jax.generation.scoring import drafter_ranks as drafter_ranks
from stree_jax.sampling.ranks import rank_of as rank_of
from stree_jax.sizing.pass_time import MeasuredTime as MeasuredTime
from stree_jax.sizing.pass_time import PassTime as PassTime
from stree_jax.sizing.pass_time import crossing as crossing
from stree_jax.sizing.pass_time import fit_pass_time as fit_pass_time
from stree_jax.sizing.pass_time import fit_quality as fit_quality
from stree_jax.sizing.pass_time import tau_ratio as tau_ratio
from stree_jax.speculation.gain import Acceptance as Acceptance
from stree_jax.speculation.gain import Prediction as Prediction
from stree_jax.speculation.gain import Ranks as Ranks
from stree_jax.speculation.gain import Seconds as Seconds
from stree_jax.speculation.gain import acceptance_from_ranks as acceptance_from_ranks
from stree_jax.speculation.gain import best as best
from stree_jax.speculation.gain import expected_tau as expected_tau
from stree_jax.speculation.gain import greedy_tree as greedy_tree
from stree_jax.speculation.gain import predicted_speedup as predicted_speedup
from stree_jax.speculation.gain import simulated_gains as simulated_gains
from stree_jax.speculation.gain import simulated_tau as simulated_tau
from stree_jax.speculation.gain import staged_gain as staged_gain
from stree_jax.speculation.gain import staged_passes as staged_passes
from stree_jax.speculation.gain import step_time as step_time
