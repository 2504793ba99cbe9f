"""The OpenAI client talks to `stree-jax serve`: a streamed text, then four at once.

Prints the streamed text, then the first line of each of the four and their tokens/s.
Run it: start `stree-jax serve --port 8000`, then python examples/server_client.py
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI  # pip install openai

PROMPTS = ["def mean(xs):\n", "import os\n", "class Shape:\n", "def is_prime(n):\n"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="an API key")
    args = parser.parse_args()

    # Until the server has started, requests fail; the client tries them again.
    client = OpenAI(base_url=args.url, api_key=args.key, max_retries=10)
    model = client.models.list().data[0].id
    options = dict(model=model, max_tokens=48, temperature=0)

    print(f"--- streamed from {model}")
    print(PROMPTS[0], end="")
    for chunk in client.completions.create(prompt=PROMPTS[0], stream=True, **options):
        print(chunk.choices[0].text, end="", flush=True)
    print()

    # The server decodes requests that arrive together as rows of one batch.
    print(f"--- {len(PROMPTS)} requests at once")
    begin = time.monotonic()
    with ThreadPoolExecutor() as pool:
        answers = pool.map(
            lambda prompt: client.completions.create(prompt=prompt, **options), PROMPTS
        )
        answers = list(answers)
    seconds = time.monotonic() - begin
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = prompt + answer.choices[0].text
        print(repr(text[:70]), "..")
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
