"""Texts of many random schemas and expressions, decoded in batches of eight: each is
valid for an independent validator, and that of plain constrained decoding.

`python -m tests.constraints.test_many 250` decodes 250 batches, 2,000 schemas.
"""

import json
import random
import re
import sys
from functools import cache

import stree_jax
from stree_jax import Constraint, Sampling
from stree_jax.constraints import rows
from tests.support.random_schemas import random_schema, validator

BATCH, MOST = 8, 48
BATCHES = 1  # of each kind, in this test; see above
PROMPTS = [f"x{i} = " for i in range(BATCH)]
EXPRESSIONS = (
    "[a-z]{2,5}",
    "(?:ab|c)+d?",
    "[0-9]{1,3}(?:,[0-9]{3})*",
    "x|yy|zzz",
    "é*a",
)


@cache
def models():
    """Returns target and draft model. The target has no logits that tie in rounding."""
    return [stree_jax.load(name, dtype="float32") for name in ("demo", "demo-drafter")]


def schemas_of(rng):
    """Returns constraints of eight random schemas, with the schemas."""
    found = []
    while len(found) < BATCH:
        schema = random_schema(rng)
        try:
            constraint = Constraint.json(schema)
            rows.vocabulary_of(models()[0]).tables(constraint)
        except ValueError:  # not supported, or too large
            continue
        found.append((constraint, schema))
    return found


def check_batch(number, kind):
    """Decodes a batch in several ways; returns how many of its texts are complete."""
    rng = random.Random(number)
    if kind == "schemas":
        wanted = schemas_of(rng)
    else:
        parts = [rng.choices(EXPRESSIONS, k=2) for _ in range(BATCH)]
        wanted = [(Constraint(f"(?:{a})-(?:{b})"), None) for a, b in parts]
    target, drafter = models()
    sampled = bool(number % 2)
    settings = [
        Sampling(0.5 + i % 3 / 2, seed=number * BATCH + i) for i in range(BATCH)
    ]
    options = dict(
        max_new_tokens=MOST,
        constraint=[constraint for constraint, _ in wanted],
        sampling=settings if sampled else None,
    )
    plain = stree_jax.generate(target, PROMPTS, drafter=None, **options)
    for way in (dict(drafter="lookup", tree="auto"), dict(drafter=drafter, tree="A")):
        found = stree_jax.generate(target, PROMPTS, **options, **way)
        assert found.tokens == plain.tokens, (number, kind, way)
    complete = 0
    for text, why, (constraint, schema) in zip(
        plain.texts, plain.finish_reasons, wanted, strict=True
    ):
        if why != "stop":
            continue
        complete += 1
        if schema is None:
            assert re.fullmatch(constraint.regex, text), text
        else:
            validator(schema).validate(json.loads(text))
    return complete


def test_random_schemas():
    assert sum(check_batch(number, "schemas") for number in range(BATCHES)) > 2


def test_random_expressions():
    assert sum(check_batch(1 + n, "expressions") for n in range(BATCHES)) > 2


if __name__ == "__main__":
    for kind in ("schemas", "expressions"):
        total = 0
        for number in range(int(sys.argv[1])):
            total += check_batch(number, kind)
            print(kind, BATCH * (number + 1), "texts,", total, "complete", flush=True)
