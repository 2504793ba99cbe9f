"""The part of `tunix.rl.rollout.base_rollout` that a rollout engine sees, for tests
without google-tunix, whose dependencies are large."""

import dataclasses
from typing import Any


class BaseRollout:
    pass


@dataclasses.dataclass
class RolloutConfig:
    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    return_logprobs: bool = False


@dataclasses.dataclass
class RolloutOutput:
    text: list
    logits: list
    tokens: list
    left_padded_prompt_tokens: Any
    logprobs: list | None
