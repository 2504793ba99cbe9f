"""A program in a pseudo-terminal, typed into as a person would."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
# Makes the terminal the controlling one, so that Ctrl-C is a signal; runs a command.
WITH_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
UP, LEFT, CTRL_C, CTRL_D = "\x1b[A", "\x1b[D", "\x03", "\x04"


def pasted(text: str) -> str:
    """Returns what a terminal with bracketed paste sends for pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


class PseudoTerminal:
    """A program with a terminal of 100 columns as its three standard streams.

    Attributes:
      seen: all text that it has written, without escape sequences.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], timeout_s: float = 30
    ) -> None:
        self.own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITH_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen, self.read_up_to, self.timeout_s = "", 0, timeout_s
        self.raw = ""
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.own)

    def type(self, keys: str) -> None:
        os.write(self.own, keys.encode())

    def wait_for(self, text: str) -> str:
        """Reads until the text appears after that of the last call. Returns the text
        between the two."""
        end = time.monotonic() + self.timeout_s
        while (found := self.seen.find(text, self.read_up_to)) < 0:
            left = end - time.monotonic()
            assert left > 0 and self._read(left), f"no {text!r} in {self.seen!r}"
        before = self.seen[self.read_up_to : found]
        self.read_up_to = found + len(text)
        return before

    def end(self) -> int:
        """Reads to the end. Returns the exit code."""
        while self._read(self.timeout_s):
            pass
        return self.process.wait(self.timeout_s)

    def _read(self, seconds: float) -> bool:
        """Reads some text; False at the end or after a time."""
        if not select.select([self.own], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.own, 65536)
        except OSError:  # Linux: the program has ended
            return False
        self.raw += self.decode(data)
        self.seen = ESCAPES.sub("", self.raw)
        return bool(data)
