"""Text that follows a JSON schema: forced text is drafted without a drafter.

Prints the answer, and the forward passes beside those of plain decoding.
Run it: python examples/json_schema.py [--model DIRECTORY_OR_GGUF_OR_HUB_ID]
"""

import argparse
import json

import stree_jax
from stree_jax import Constraint

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "genre": {"enum": ["novel", "poetry", "science"]},
        "in_print": {"type": "boolean"},
    },
    "required": ["title", "year", "genre", "in_print"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    parser.add_argument("--prompt", default="# A book as JSON\nbook = ")
    args = parser.parse_args()

    target = stree_jax.load(args.model)
    options = dict(max_new_tokens=96, constraint=Constraint.json(SCHEMA))
    fast = stree_jax.generate(target, args.prompt, drafter="lookup", **options)
    plain = stree_jax.generate(target, args.prompt, drafter=None, **options)

    print(json.dumps(json.loads(fast.texts[0]), indent=2))
    print(f"{fast.target_calls[0]} passes, {plain.target_calls[0]} of plain decoding")
    print("identical output:", fast.tokens == plain.tokens)


if __name__ == "__main__":
    main()
