"""Text as it is generated, then more of it without prefilling the beginning again.

Prints a text piece by piece up to a stop string, then a second turn that continues it.
Run it: python examples/stream.py [--model DIRECTORY_OR_GGUF_OR_HUB_ID]
"""

import argparse

import stree_jax

PROMPT = "class Shape:\n    @property\n    def area(self):\n"
STOP = "@property"
NEXT = "\n    def perimeter(self):\n"


def show(parts):
    """Prints the new text of each part and returns the last part, which is the result.

    `new_texts` are whole characters, and the beginning of a stop string is held back.
    """
    for part in parts:
        print(part.new_texts[0], end="", flush=True)
    return part


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    args = parser.parse_args()
    target = stree_jax.load(args.model)

    # There is a part after every two target passes.
    options = dict(steps=2, max_new_tokens=64, keep_past=True)
    print(PROMPT, end="")
    first = show(stree_jax.stream(target, PROMPT, stop_strings=STOP, **options))

    # The text is without the stop string, but the cached state in `past` has read it.
    print(f"{first.stop_reasons[0] or ''}{NEXT}", end="")
    second = show(stree_jax.stream(target, NEXT, past=first.past, **options))

    print("\n")
    for name, turn in {"first": first, "second": second}.items():
        reason, stop = turn.finish_reasons[0], turn.stop_reasons[0]
        print(f"{name} turn: {turn.lengths[0]} tokens, finished by {reason} ({stop!r})")
    print(f"tokens in the cached state: {len(second.past.tokens[0])}")


if __name__ == "__main__":
    main()
