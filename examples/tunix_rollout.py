"""A rollout engine for tunix (google-tunix 0.1.7) that drafts, in place of its sampler.

Prints the samples, and how far their log-probabilities are from the trainer's.
Run it: python examples/tunix_rollout.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

import stree_jax
from stree_jax.sampling import sampling_arrays


@partial(jax.jit, static_argnames=("tree", "most"))
def rollout(model, drafter, prompts, mask, sampling, tree, most):
    return stree_jax.generate_tokens(
        model,
        prompts,
        mask=mask,
        max_new_tokens=most,
        drafter="lookup" if drafter is None else drafter,
        tree=tree,
        sampling=sampling,
        logprobs=0,
    )


class StreeRollout(BaseRollout):
    """Samples with drafts, of a draft model or else of prompt lookup.

    `update_params` takes parameters of the same model, such as a trainer's.
    """

    def __init__(self, model, drafter=None, tree="A"):
        self._model, self._drafter, self._tree = model, drafter, tree

    def generate(self, prompts, rollout_config, **kwargs):
        config, width = rollout_config, rollout_config.max_prompt_length
        encode = self._model.tokenizer.encode
        ids = [encode(text).ids[-width:] for text in prompts]
        padded = np.array([[self.pad_id()] * (width - len(r)) + r for r in ids])
        mask = np.array([[0] * (width - len(r)) + [1] * len(r) for r in ids])
        sampling = None
        if config.temperature > 0:
            top_k = None if config.top_k in (None, -1) else config.top_k
            top_p = None if config.top_p in (None, 1.0) else config.top_p
            key = jax.random.key(0) if config.seed is None else config.seed
            settings = {"temperature": config.temperature, "key": key}
            sampling = sampling_arrays(len(ids), top_k=top_k, top_p=top_p, **settings)
        done = jax.device_get(
            rollout(
                self._model,
                self._drafter,
                padded,
                mask,
                sampling,
                tree=self._tree,
                most=config.max_tokens_to_generate,
            )
        )

        def cut(rows):
            return [row[:end] for row, end in zip(rows, done.length, strict=True)]

        tokens = cut(done.tokens)
        decode = self._model.tokenizer.decode
        return RolloutOutput(
            text=[decode(row.tolist()) for row in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=padded,
            logprobs=cut(done.logprobs.processed) if config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        """Returns the policy's log-probabilities [B, O] of completions [B, O]."""
        prompts, width = jnp.asarray(prompt_tokens), prompt_tokens.shape[1]
        whole = jnp.concatenate([prompts, jnp.asarray(completion_tokens)], axis=1)
        begin = jnp.argmax(prompts != self.pad_id(), axis=1)[:, None]
        place = jnp.arange(whole.shape[1])[None]
        texts = jnp.take_along_axis(whole, (place + begin) % whole.shape[1], axis=1)
        at_one = stree_jax.Sampling(temperature=1.0)  # as tunix's trainers
        found = stree_jax.token_logprobs(self._model, texts, sampling=at_one)
        return jnp.take_along_axis(found, place[:, width:] - begin, axis=1)

    def update_params(self, params, filter_types=None):
        self._model = self._model.replace(params=params)

    def pad_id(self):
        return self.eos_id()

    def eos_id(self):
        return self._model.config.stop_tokens[0]

    def model(self):
        return self._model


def main():
    engine = StreeRollout(stree_jax.load("demo", dtype="float32"))
    config = RolloutConfig(
        max_tokens_to_generate=24, temperature=1.0, return_logprobs=True
    )
    out = engine.generate(["def area(r):\n", "import os\n"], config)
    rows = [np.pad(row, (0, 24 - len(row))) for row in out.tokens]
    found = engine.get_per_token_logps(out.left_padded_prompt_tokens, np.array(rows))
    for text, own, trainer in zip(out.text, out.logprobs, found, strict=True):
        far = np.abs(own - trainer[: len(own)]).max()
        print(f"--- {len(own)} tokens, distance to the trainer {far:.3g}\n{text}")


if __name__ == "__main__":
    main()
