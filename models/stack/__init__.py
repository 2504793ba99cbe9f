"""A model: its config, parameters, state and passes."""
