"""Runs `stree-jax serve` as a separate process, on a free port."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import openai

ROOT = Path(__file__).parent.parent.parent
KEY = "a key of nobody"


class Process:
    """A server process and the lines that it prints.

    Args:
      ready: whether to wait until the server is ready. If false, only until it listens.
    """

    def __init__(self, *options, ready=True):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stree_jax", "serve", "--port", "0", *options],
            cwd=ROOT,
            env=os.environ | {"STREE_JAX_API_KEY": KEY},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines, self.port = [], None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)/v1", line):
                self.port = int(found[1])
            if self.port and (not ready or line.startswith("stree-jax: ready in")):
                break
        else:
            raise AssertionError("".join(self.lines))
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self):
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def root_url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self, key=KEY):
        url = f"{self.root_url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)

    def ended(self, seconds=30):
        """Returns the exit code once the process ends. All its lines are then in
        `lines`."""
        code = self.process.wait(seconds)
        self._listener.join()
        self.process.stderr.close()
        return code
