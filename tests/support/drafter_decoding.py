"""Speculative decoding with a drafter of `drafter_reference` and a target of
transformers, both in float64, without caches."""

import numpy as np
import torch

from tests.support import drafter_reference as reference


class HFTarget:
    """A model of transformers whose residual stream is read at layer boundaries.

    Boundary b is the stream after b of the model's layers, before any later norm.
    """

    def __init__(self, model, boundaries):
        self.model, self.boundaries = model.eval().double(), boundaries

    def __call__(self, tokens):
        """Returns (logits [N, V], taps [N, m, d]) of a text."""
        found, hooks = {}, []

        def keep(boundary):
            def hook(module, args, kwargs=None, out=None):
                out = out if isinstance(out, torch.Tensor) else out[0]
                found[boundary] = out[0].numpy()

            return hook

        def keep_input(module, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            found[0] = x[0].numpy()

        layers = self.model.base_model.layers
        for boundary in self.boundaries:
            if boundary == 0:
                hook = layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
            else:
                hook = layers[boundary - 1].register_forward_hook(
                    keep(boundary), with_kwargs=True
                )
            hooks.append(hook)
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits
        for hook in hooks:
            hook.remove()
        return logits[0].numpy(), np.stack([found[b] for b in self.boundaries], 1)

    def text(self, prompt, count):
        """Returns the greedy text of `count` tokens after the prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self(tokens)[0][-1].argmax()))
        return tokens[len(prompt) :]


def drafts_at(arrays, facts, tokens, taps, place, depth):
    """Returns the draft tokens after tokens[place], which the target has not read."""
    if facts.kind in ("eagle3", "peagle"):
        run = {"eagle3": reference.eagle_draft, "peagle": reference.peagle_draft}
        pairs = tokens[1 : place + 1], taps[:place]
        return run[facts.kind](arrays, facts, *pairs, depth)[0]
    return reference.draft(arrays, facts, taps[:place], tokens[place])[0][:depth]


def gains(arrays, facts, target, prompt, text, depth):
    """Returns how many tokens each verification pass adds to a greedy text.

    Chains of `depth` are drafted, the first one after the last token of the prompt.
    """
    tokens = list(prompt) + list(text)
    _, taps = target(tokens)
    place, found = len(prompt) - 1, []
    while place < len(tokens) - 1:
        drafts = drafts_at(arrays, facts, tokens, taps, place, depth)
        accepted = 0
        for draft, token in zip(drafts, tokens[place + 1 :], strict=False):
            if draft != token:
                break
            accepted += 1
        gained = min(accepted + 1, len(tokens) - 1 - place)
        found.append(gained)
        place += gained
    return found


def with_fitted_head(arrays, facts, target, texts, penalty=1e-3):
    """Returns the weights with a head that mostly predicts the texts.

    Ridge regression from a drafter's states to the tokens after them, when it drafts
    one token at every place of the texts.
    """
    states, rows = [], []
    ids = arrays.get("head_ids", np.arange(len(arrays["head"])))
    ones = arrays | {"head": np.eye(arrays["norm"].size)}
    ones.pop("head_ids", None)
    for tokens in texts:
        _, taps = target(tokens)
        for place in range(1, len(tokens) - 1):
            states.extend(_states(ones, facts, tokens, taps, place))
            depth = len(states) - len(rows)
            after = tokens[place + 1 : place + 1 + depth]
            del states[len(rows) + len(after) :]
            rows.extend(after)
    x, y = np.array(states), np.array(rows)[:, None] == ids
    gram = x.T @ x + penalty * len(x) * np.eye(x.shape[1])
    return arrays | {"head": 10 * np.linalg.solve(gram, x.T @ (y - y.mean(0))).T}


def _states(arrays, facts, tokens, taps, place):
    """Returns the states [levels, d] that predict the tokens after tokens[place]."""
    if facts.kind == "eagle3":
        pairs = tokens[1 : place + 1], taps[:place]
        return reference.eagle_draft(arrays, facts, *pairs, 1)[1]
    if facts.kind == "peagle":
        pairs = tokens[1 : place + 1], taps[:place]
        return reference.peagle_draft(arrays, facts, *pairs, 3)[1]
    states = reference.block_states(arrays, facts, taps[:place], tokens[place])
    return states if facts.from_anchor else states[1:]
