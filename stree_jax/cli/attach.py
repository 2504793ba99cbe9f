"""Sends a command to a process that keeps the model loaded (`--keep`).

A process of Python and JAX takes a second to start, and a model takes longer to load.
So the first command with `--keep` starts a process that runs it and stays (`resident`),
as Ollama's server does. Later commands send it their arguments, environment and
standard streams, and it runs them. Nothing listens on a network.

This module imports only what is imported fast. If anything is not as expected, the
command runs in its own process, as without `--keep`.

The socket is in a folder that no other user can enter. Its name is a digest of the
version, the source, the interpreter and the environment, because a process keeps these
from its start.
The resident process first says `READY` or `BUSY`. The command then sends one JSON line
with its standard streams attached, and later a byte for each signal. At the end it gets
the exit code.
"""

import argparse
import hashlib
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from stree_jax.cli.common import print_status
from stree_jax.common.programs import source_digest
from stree_jax.common.version import __version__

VARIABLE = "STREE_JAX_KEEP"
READY, BUSY = b"ready\n", b"busy\n"
INTERRUPT, RESIZED = b"i", b"w"  # SIGINT and SIGWINCH
ANSWER_S = 5.0  # seconds to wait for the first answer
ALONE = -1  # instead of seconds: without a resident process
UNITS = {"s": 1, "m": 60, "h": 3600}
LONGEST_S = 7 * 24 * 3600
# Variables that a process reads only when it starts.
AT_START = (
    *("CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "TZ", "XDG_CACHE_HOME"),
)
PREFIXES = ("HF_", "HUGGINGFACE_", "JAX_", "PYTHON", "STREE_JAX_", "TF_XLA_", "XLA_")


def duration(text: str) -> int:
    """Returns the seconds that a text such as "5m" names, or `ALONE` for "off".

    Raises:
      argparse.ArgumentTypeError: it is no such text.
    """
    if text == "off":
        return ALONE
    number, unit = text[:-1], text[-1:]
    if number.isascii() and number.isdigit() and unit in UNITS:
        seconds = int(number[:9]) * UNITS[unit]
        if seconds <= LONGEST_S:
            return seconds
    raise argparse.ArgumentTypeError(
        f"{text!r:.40}: want seconds, minutes or hours such as 30s, 5m or 1h (at most "
        "168h), or off"
    )


def kept_for(args: argparse.Namespace) -> int:
    """Returns the seconds for which a command keeps its model, from --keep or the
    environment; `ALONE` if it does not.

    A custom drafter is a Python module that may change, and several processes or
    devices start together: both run in processes of their own.
    """
    if not hasattr(args, "keep"):
        return ALONE
    alone = ":" in str(getattr(args, "drafter", None))
    alone |= any(getattr(args, n, None) is not None for n in ("mesh", "processes"))
    if alone or not hasattr(socket, "SCM_RIGHTS"):
        return ALONE
    if args.keep is not None:
        return int(args.keep)
    try:
        return duration(os.environ.get(VARIABLE) or "off")
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{VARIABLE}: {error}") from error


def run_attached(argv: Sequence[str], seconds: int) -> int | None:
    """Runs a command in the resident process, and starts that process if necessary.

    Args:
      argv: the command's arguments.
      seconds: how long the resident process stays when it has nothing to do; `ALONE`
        for none.

    Returns:
      The exit code; None if the command has to run in this process.
    """
    if seconds == ALONE or _in_background():
        return None
    try:
        connection = _connected(_socket_path(), seconds)
    except OSError as error:
        print_status(f"stree-jax: --keep: the model is not kept ({error})")
        return None
    if connection is None:
        return None
    with connection:
        try:
            # Streams that were sent to a process that hangs would never be closed.
            if connection.recv(len(READY), socket.MSG_WAITALL) != READY:
                return None
            _send(connection, argv, seconds)
        except OSError:
            return None
        connection.settimeout(None)
        with _forwarding(connection):
            return _exit_code(connection)


def _in_background() -> bool:
    """True if this process is in the background of its terminal, so that it may not
    read from it."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # standard input is no terminal
        return False


def _exit_code(connection: socket.socket) -> int:
    answer = b""
    with suppress(OSError):
        while part := connection.recv(16):
            answer += part
    if answer.strip().isdigit():
        return int(answer)
    print_status(
        "stree-jax: the process that keeps the model has ended before the command did; "
        "run it again, or with --keep off"
    )
    return 2


def folder() -> Path:
    """Returns the folder of the sockets, which only this user can enter.

    Raises:
      OSError: there is no such folder, or it is not safe.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base) and os.path.isdir(base):
        path = Path(base, "stree-jax")
    else:
        path = Path("/tmp", f"stree-jax-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    about = path.lstat()
    mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    if not mine or about.st_mode & 0o077:
        raise PermissionError(f"{path}: want a folder that only its owner can enter")
    return path


def _socket_path() -> Path:
    environment = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) or name in AT_START
        if name != VARIABLE
    )
    parts = __version__, source_digest(), sys.executable, sys.flags, environment
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    return folder() / f"{name}.sock"


def _connected(path: Path, seconds: int) -> socket.socket | None:
    """Returns a connection to the resident process. Starts that process if necessary,
    unless `seconds` is 0."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        if not seconds or not _start(path):
            connection.close()
            return None
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    if not _is_of_this_user(connection):
        connection.close()
        return None
    return connection


def _is_of_this_user(connection: socket.socket) -> bool:
    """True if the other side is a process of the same user, where this can be asked."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder's permissions say so
    form = "3i"  # process, user, group
    asked = socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form)
    return bool(struct.unpack(form, connection.getsockopt(*asked))[1] == os.getuid())


def _start(path: Path) -> bool:
    """Starts the resident process with a listening socket. False if another command is
    starting one."""
    import fcntl

    with open(path.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)  # of a process that was killed
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(8)
            number = listening.fileno()
            subprocess.Popen(
                [sys.executable, "-m", "stree_jax.cli.resident", str(number), path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # With more arenas, glibc keeps 20 MB more after each change of models.
                env={"MALLOC_ARENA_MAX": "1", **os.environ},
                pass_fds=[number],
                start_new_session=True,
            )
    return True


def _send(connection: socket.socket, argv: Sequence[str], seconds: int) -> None:
    request = {
        "argv": list(argv),
        "cwd": os.getcwd(),
        "has_input": sys.stdin is not None,  # closed, it is the null device here
        "environment": dict(os.environ),
        "seconds": seconds,
        "umask": _umask(),
    }
    body = json.dumps(request).encode() + b"\n"  # surrogates of odd names are escaped
    sent = socket.send_fds(connection, [body], [0, 1, 2])
    if rest := body[sent:]:  # even an empty one fails if the command has ended
        connection.sendall(rest)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextmanager
def _forwarding(connection: socket.socket) -> Iterator[None]:
    """Sends Ctrl-C and changes of the terminal's size to the resident process."""
    sent: Mapping[int, bytes] = {
        signal.SIGINT: INTERRUPT,
        signal.SIGWINCH: RESIZED,
    }

    def forward(number: int, _: object) -> None:
        with suppress(OSError):
            connection.sendall(sent[number])

    # A script's background job ignores Ctrl-C.
    heard = [n for n in sent if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
