"""Test that no field of a config.json is ignored silently, whatever its family."""

import contextlib
import dataclasses

import numpy as np
import pytest

from tests.stories.test_config_fields import CASES
from tests.support.edited_config import GONE, LIMIT

KEPT = ("architectures", "model_type", "transformers_version", "dtype")
# transformers divides loaded weights here; see the warning above.
PURE = ("mamba1", "falcon-mamba", "mamba2")
MISREAD = {(name, "rescale_prenorm_residual") for name in PURE}
# With the default of 1e-6, the output norms of Gated DeltaNet enlarge rounding errors:
# in float32, transformers is up to 2e-4 off float64 (and this library 5e-5).
ROUNDED = {(f"qwen3-{name}", "rms_norm_eps") for name in ("next", "5", "5-moe")}


def edits(fields):
    """Yields pairs (name, value): edits of each field, chosen by its old value."""
    for name, value in fields.items():
        if name in KEPT:
            continue
        yield from ((name, other) for other in [GONE, None, *others(name, value)])


def others(name, value):
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value, value // 2]
        case float():
            return [1.5 * value + 0.1 * (value == 0)]
        case str() if "act" in name:
            return ["gelu", "relu", "relu2", "gelu_pytorch_tanh", "swish"]
        case str():
            return ["nope", "rope", "other"]
        case [*numbers] if numbers and all(isinstance(n, float) for n in numbers):
            return [[1.3 * number for number in value], value[::-1]]
        case list():
            return [value[::-1], value[:-1]]
        case None:
            return [1, True, 0.5, "silu"]
    return []


@pytest.mark.parametrize("family", CASES)
def test_no_field_is_ignored_silently(edited, family):
    """Edits every field of the family's config class in several ways, and adds fields
    of other families."""
    source = edited(family)
    names = [field.name for field in dataclasses.fields(source.options)]
    fields = {n: getattr(source.options, n, None) for n in names} | source.fields
    plain = (bool, int, float, str, list, type(None))
    fields = {n: v for n, v in fields.items() if isinstance(v, plain)}
    foreign = {n: v for other in CASES for n, v in edited(other).fields.items()}
    foreign = [(n, v) for n, v in foreign.items() if n not in source.fields]
    wrong = []
    for name, value in [*edits(fields), *foreign]:
        if (family, name) in MISREAD | ROUNDED:
            continue
        source.edit({name: value})
        theirs = None
        with contextlib.suppress(Exception):  # transformers may raise anything
            theirs = source.reference()
        ours = source.result()
        if isinstance(ours, str):
            if not any(word in ours for word in ("config.json: ", "tensor", "shape")):
                wrong.append(f"{name}={value}: refused without a name: {ours}")
        elif theirs is not None and not np.allclose(ours, theirs, rtol=0, atol=LIMIT):
            wrong.append(f"{name}={value}: another number in transformers")
    assert not wrong, "\n".join(wrong)
