"""Which layers of a model are cut over n devices, and what a part's architecture is."""

from dataclasses import replace

from stree_jax.models.config import MambaConfig, ModelConfig, MoEConfig, given
from stree_jax.models.params import (
    Param,
    Path,
    Table,
    adapter_runs,
    attention_params,
    low_rank_params,
    mamba_params,
    mlp_params,
    model_params,
    moe_params,
    mtp_params,
    shared_params,
)
from stree_jax.models.sharding.shards import WHOLE, Cut


def cut_of(c: ModelConfig, n: int) -> Cut:
    """How a model is cut over n devices.

    What does not divide is in every part: a kind of mixer whose heads do not, or whose
    groups and heads of keys neither divide by n nor n by them, and so on.
    """
    d = c.d_model
    mamba = c.mamba is not None and _divides(mamba_params(c.mamba, d), n)
    if mamba and given(c.mamba).norm is not None:
        groups = given(c.mamba).norm_groups
        mamba = groups % n == 0 or n % groups == 0
    attention = c.attention is not None and _divides(
        attention_params(c.attention, d), n
    )
    mlp = c.mlp is not None and _divides(mlp_params(c.mlp, d), n)
    moe = c.moe is not None and _divides(moe_params(c.moe, d), n)
    if moe and (shared := given(c.moe).shared) is not None:
        moe = _divides(mlp_params(shared, d), n)
    return Cut(
        mamba=n if mamba else 1,
        attention=n if attention else 1,
        mlp=n if mlp else 1,
        moe=n if moe else 1,
        norm=_norm_parts(given(c.mamba), n) if mamba else 1,
        width=n if (c.shared or c.mtp) and d % n == 0 else 1,
        vocab=n if c.vocab_size % n == 0 else 1,
    )


def _divides(table: Table, n: int) -> bool:
    return all(run.divides(n) for param in table.values() for run in param.runs)


def _norm_parts(c: MambaConfig, n: int) -> int:
    """Over how many of n parts a group of the gated norm reaches."""
    return 1 if c.norm is None else max(n // c.norm_groups, 1)


def part_config(c: ModelConfig, cut: Cut) -> ModelConfig:
    """The architecture of a part: the sizes that it has."""
    m, a, mlp, moe = c.mamba, c.attention, c.mlp, c.moe
    if m is not None:
        n = cut.mamba
        m = replace(
            m,
            num_heads=m.num_heads // n,
            n_groups=max(m.n_groups // n, 1),
            x_heads=None if m.x_heads is None else max(m.x_heads // n, 1),
            d_mlp=m.d_mlp // n,
            norm_groups=max(m.norm_groups // n, 1),
        )
    if a is not None:
        n = cut.attention
        kv = max(a.num_kv_heads // n, 1)
        a = replace(a, num_heads=a.num_heads // n, num_kv_heads=kv, d_mlp=a.d_mlp // n)
    if mlp is not None:
        mlp = replace(mlp, d_hidden=mlp.d_hidden // cut.mlp)
    if moe is not None:
        moe = _part_of_experts(moe, cut.moe)
    vocab = c.vocab_size // cut.vocab
    return replace(c, vocab_size=vocab, mamba=m, attention=a, mlp=mlp, moe=moe)


def _part_of_experts(c: MoEConfig, n: int) -> MoEConfig:
    shared = c.shared
    if shared is not None:
        shared = replace(shared, d_hidden=shared.d_hidden // n)
    return replace(c, d_hidden=c.d_hidden // n, shared=shared)


def param_at(c: ModelConfig, path: Path) -> Param | None:
    """Returns a parameter's entry in its layer's table; None of a norm."""
    return _param_and_parts(c, WHOLE, path)[0]


def cut_at(c: ModelConfig, cut: Cut, path: Path) -> tuple[Param | None, int]:
    """Returns a parameter's entry in its layer's table, and over how many devices it is
    divided; (None, 1) of a parameter that every device has whole."""
    param, n = _param_and_parts(c, cut, path)
    return (None, 1) if param is None or not param.runs else (param, n)


def _param_and_parts(c: ModelConfig, cut: Cut, path: Path) -> tuple[Param | None, int]:
    d, name = c.d_model, path[-1]
    table: Table = {}
    n = 1
    match path:
        case (*_, "adapters", module, _):
            table = low_rank_params(1, 1, adapter_runs(c)[module])
            n = cut.mlp if module == "gate_up" else cut.attention
        case (*_, "moe", "shared", _):
            table, n = mlp_params(given(given(c.moe).shared), d), cut.moe
        case (*_, "moe", _):
            table, n = moe_params(given(c.moe), d), cut.moe
        case (*_, "mlp", _):
            table, n = mlp_params(given(c.mlp), d), cut.mlp
        case (*_, "mamba", _):
            table, n = mamba_params(given(c.mamba), d), cut.mamba
        case (*_, "attention", _):
            table, n = attention_params(given(c.attention), d), cut.attention
        case (*_, "linear"):
            table, n = shared_params(d), cut.width
        case (*_, "eh_proj"):
            table, n = mtp_params(d), cut.width
        case (_,):
            table, n = model_params(c), cut.vocab
    return table.get(name), n
