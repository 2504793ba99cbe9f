"""Checkpoints of tiny random models whose config.json is edited."""

import dataclasses
import functools
import json
import warnings

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax.convert import CheckpointError, checked, open_local
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models import Model
from tests.support.hf_checkpoints import HF_CASES, VOCAB

TOKENS = np.random.default_rng(7).integers(0, VOCAB, 37)
LIMIT = 1e-4  # largest difference of logits
GONE = "(the field is removed)"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


class Edited:
    """A checkpoint whose config is edited repeatedly.

    Attributes:
      options: the config as transformers' class.
      fields: the config as in the file, before edits.
      unedited: the library's config and logits, and transformers' logits, of the
        directory without edits.
    """

    def __init__(self, directory, family):
        self.directory = directory
        other = HF_CASES[family]()
        other.save_pretrained(directory)
        self.options = other.config
        # Sizes of Gemma 4's layers
        self.options.allow_global_per_layer_attribute_access = True
        self.fields = json.loads((directory / "config.json").read_text())

    @functools.cached_property
    def unedited(self):
        checkpoint, theirs = self.opened(), self.reference()
        ours = self.logits(checkpoint)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=LIMIT)
        return checkpoint.config, ours, theirs

    def edit(self, changes):
        """Writes the config with some fields replaced or removed."""
        assert self.unedited  # is computed before the first edit
        fields = self.fields | changes
        fields = {k: v for k, v in fields.items() if v is not GONE}
        (self.directory / "config.json").write_text(json.dumps(fields))

    def reference(self):
        """Returns the logits of transformers for the directory."""
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype="float32")
        with torch.no_grad():
            return model.eval()(torch.tensor(TOKENS)[None]).logits[0].numpy()

    def opened(self):
        with warnings.catch_warnings(action="ignore"):
            return checked(
                open_local(CheckpointFiles(self.directory), warn=warnings.warn)
            )

    def logits(self, checkpoint):
        model = Model(checkpoint.read(), checkpoint.config)
        return np.asarray(stree_jax.score(model, TOKENS[None])[0])

    def result(self):
        """Returns the library's logits, or the error message. Equal configs share a
        program."""
        try:
            checkpoint = self.opened()
        except CheckpointError as error:
            return str(error)
        before, ours, _ = self.unedited
        config = dataclasses.replace(checkpoint.config, stop_tokens=())
        if config == dataclasses.replace(before, stop_tokens=()):
            return ours
        return self.logits(checkpoint)
