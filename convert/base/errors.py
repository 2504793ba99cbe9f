"""The exception that all code raises which reads or writes checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. The message is one line that says what is
    wrong and where.

    Example:
      >>> stree_jax.load("/no/such/folder")
      Traceback (most recent call last):
      ...
      CheckpointError: /no/such/folder: no such file or directory
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())  # names and reasons may have line breaks
        super().__init__(line if len(line) <= 900 else f"{line[:600]}...{line[-200:]}")
