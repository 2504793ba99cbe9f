"""The one exception of everything that reads or writes checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line says what and where."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())  # names and reasons are others' text
        super().__init__(line if len(line) <= 900 else f"{line[:600]}...{line[-200:]}")
