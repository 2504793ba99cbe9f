"""llama.cpp in a process of its own, by the Python that has it: `llama_worker.py`."""

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

WORKER = Path(__file__).with_name("llama_worker.py")


class Ask(Protocol):
    """Sends an order and waits for its answer; see `llama_worker.Session`."""

    def __call__(self, order: str, **what: Any) -> dict[str, Any]: ...


@contextmanager
def llama_process(python: Path) -> Iterator[Ask]:
    """Starts a process that runs orders one by one, and yields how to send them.

    Args:
      python: an interpreter whose environment has llama-cpp-python.

    Raises:
      ValueError: there is no such interpreter.
      RuntimeError: the process ended during an order; with its last error line.
    """
    with tempfile.TemporaryFile("w+") as errors:
        # Isolated: it must not import our modules, or modules in the worker's folder.
        command = [str(python), "-I", str(WORKER)]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, text=True
            )
        except OSError as error:
            raise ValueError(f"--llama-python: {python}: {error.strerror}") from error

        def ask(order: str, **what: Any) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps({"order": order, **what}) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                died = _signal_of(process)
                raise RuntimeError(f"llama.cpp, {order}: {died}{_last_line(errors)}")
            return json.loads(answer)

        try:
            yield ask
        finally:
            process.kill()
            process.communicate()


def llama_version(python: Path) -> dict[str, Any]:
    """Returns the version of llama-cpp-python, and llama.cpp's instruction sets.

    Raises:
      ValueError: this Python cannot run llama.cpp.
    """
    try:
        with llama_process(python) as ask:
            return ask("describe")
    except RuntimeError as error:
        raise ValueError(
            f"--llama-python: {python}: {error}; pip install llama-cpp-python there"
        ) from error


def _signal_of(process: subprocess.Popen[str]) -> str:
    """Names the signal that a process died of, if any."""
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    return f"died of {signal.Signals(-code).name}; at last: " if code < 0 else ""


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    return lines[-1] if lines else "the process ended"
