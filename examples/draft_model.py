"""A draft model proposes a tree of tokens; the target verifies it in one forward pass.

Prints a table: acceptance length, tokens/s and speedup of four ways to decode.
Run it: python examples/draft_model.py [--model TARGET --drafter SMALLER_MODEL]
"""

import argparse

import stree_jax


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    parser.add_argument("--drafter", default="demo-drafter", help="same tokenizer")
    parser.add_argument("--prompt", default="def mean(xs):\n")
    args = parser.parse_args()

    target = stree_jax.load(args.model)
    drafter = stree_jax.load(args.drafter)
    setups = {
        "plain decoding": dict(drafter=None),
        "chain of 4": dict(drafter=drafter, tree="chain:4"),  # a chain has no branches
        "tree A": dict(drafter=drafter, tree="A"),  # 4 levels of 3 nodes
        "auto": dict(drafter=drafter, tree="auto"),  # chooses a tree at every step
    }
    rates, plain = {}, None
    print(f"{'':15}  acceptance length  tokens/s  speedup")
    for name, options in setups.items():
        options["max_new_tokens"] = 96
        stree_jax.generate(target, args.prompt, **options)  # compiles the programs
        result = stree_jax.generate(target, args.prompt, **options)
        plain = plain or result
        rates[name] = result.lengths[0] / result.decode_s
        speedup = rates[name] / rates["plain decoding"]
        length = result.acceptance_length[0]
        print(f"{name:15}  {length:17.2f}  {rates[name]:8.0f}  {speedup:6.2f}x", end="")
        print("" if result.tokens == plain.tokens else "  (another text)")
    print()
    print(args.prompt + plain.texts[0])


if __name__ == "__main__":
    main()
