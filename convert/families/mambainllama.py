"""Reads MambaInLlama checkpoints: a Llama with some attention layers replaced by
Mamba2. Models cannot be exported to this format.

The projections q, k and v became C, B and x. x and B have the teacher's KV heads, which
are repeated after the convolution. Every head has its own group of C and of the norm.
"""

from dataclasses import replace

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, native, read
from stree_jax.convert.families.family import RECOMPUTED, Family
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.families.tensor_map import Part, mamba_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import MambaConfig, ModelConfig
from stree_jax.models.stack.config import blocks

MODELS = "MambaInLlama, Mamba-2 flavour"
FILE = "mamba_config.json"
NAMES = llama.NAMES.with_parts(mamba=Part("mamba", mamba_rows))

MAMBA = (
    Field("ngroups", "num_heads", read.size),
    Field("d_state", "d_state", read.size),
    Field("d_conv", "d_conv", read.size, 4),
    Field("dt_limit", "dt_limit", read.limits, read.NO_LIMITS),
    Field("D_has_hdim", "D_per_channel", read.flag, False),
    Field("bias", "proj_in_bias", read.bias("mamba.in_proj.bias"), False),
    Field("bias", "proj_out_bias", read.bias("mamba.out_proj.bias"), False),
    Field("conv_bias", "conv_bias", read.bias("conv1d.bias"), True),
)


def parse(fields: ConfigFields) -> ModelConfig:
    teacher = llama.parse(fields)
    mixer, tensors = fields.beside(FILE), fields.tensors
    old = [n for n in tensors if n.endswith((".in_proj_x.weight", ".dt_proj.weight"))]
    if old:
        raise CheckpointError(
            f"{tensors[old[0]].file}: {old[0]}: these are Mamba-1 layers; want Mamba2"
        )
    _check_alike(fields, mixer)
    ssm = mixer.object("ssm_cfg")
    ssm.only(f"{native.SSM_FIELDS} repeat_kv_before_conv")
    if ssm.flag("repeat_kv_before_conv", False):
        raise ssm.error("repeat_kv_before_conv", "true is not supported")
    options = read_fields(MAMBA, ssm)
    heads, head_dim = options["num_heads"], options["d_state"]
    d_inner = mixer.size("d_inner")
    if d_inner != heads * head_dim:
        raise mixer.error("d_inner", f"{d_inner} is not ngroups {heads} * {head_dim}")
    x_heads = mixer.divide("d_xb", mixer.size("d_xb"), head_dim)
    mixer.divide("d_xb", heads, x_heads)
    depth = len(teacher.layers) // 2
    mixers = hf.chosen_mixers(mixer, "attn_layers", depth)
    mamba = MambaConfig(
        **options,
        head_dim=head_dim,
        n_groups=heads,
        norm=native.norm_order(ssm),
        norm_groups=heads,
        x_heads=x_heads,
    )
    return replace(
        teacher.with_mixers(mamba=mamba), layers=blocks(hf.with_mlps(mixers))
    )


def _check_alike(teacher: ConfigFields, mixer: ConfigFields) -> None:
    """Raises CheckpointError if the two config files disagree.

    The original code reads the activation and the norm's epsilon from the mixer's file
    for its layers and from the teacher's file for all other layers.
    """
    hf.check_silu(mixer)
    eps = teacher.positive("rms_norm_eps", 1e-6)
    if (own := mixer.positive("rms_norm_eps", eps)) != eps:
        problem = f"{own} is not that of {teacher.file.name}, {eps}"
        raise mixer.error("rms_norm_eps", problem)


FAMILY = Family(
    "mambainllama", MODELS, NAMES, parse, exported="no", compared=RECOMPUTED, file=FILE
)
