"""Prompt lookup: faster decoding of text that repeats itself, without a draft model.

Prints the text, the acceptance length, and the time beside that of plain decoding.
Run it: python examples/prompt_lookup.py [--model DIRECTORY_OR_GGUF_OR_HUB_ID]
"""

import argparse

import stree_jax

PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    parser.add_argument("--prompt", default=PROMPT)
    args = parser.parse_args()

    target = stree_jax.load(args.model)
    results = {}
    for drafter in ("lookup", None):  # None: plain decoding
        options = dict(drafter=drafter, max_new_tokens=96)
        stree_jax.generate(target, args.prompt, **options)  # compiles the programs
        results[drafter] = stree_jax.generate(target, args.prompt, **options)

    lookup, plain = results["lookup"], results[None]
    print(args.prompt + lookup.texts[0])
    print()
    tokens, passes = lookup.lengths[0], lookup.target_calls[0]
    print(f"{tokens} tokens in {passes} forward passes of the target model:")
    print(f"acceptance length {lookup.acceptance_length[0]:.2f} tokens per pass")
    print(f"prompt lookup  {lookup.decode_s:.3f} s")
    print(f"plain decoding {plain.decode_s:.3f} s")
    print("identical output:", lookup.tokens == plain.tokens)


if __name__ == "__main__":
    main()
