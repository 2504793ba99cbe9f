"""The one exception of everything that reads or writes checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line says what and where."""
