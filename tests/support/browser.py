"""A headless Chromium that tests control over a pipe (the DevTools protocol), without a
driver program."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
SWITCHES = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 30  # for an answer of the browser
KEYS = {"Enter": (13, "\r"), "Escape": (27, "")}


class Browser:
    """A window of Chromium.

    Args:
      profile: a new folder for its files.

    Attributes:
      requests: URLs of all requests so far.
      messages: errors of scripts, and messages of the console and of the policy.
    """

    def __init__(self, profile):
        (from_us, self._out), (self._in, from_it) = os.pipe(), os.pipe()
        command = [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        # The browser reads descriptor 3 and writes descriptor 4.
        line = f'exec "$@" 3<&{from_us} 4>&{from_it}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", *command],
            pass_fds=(from_us, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (from_us, from_it):
            os.close(descriptor)
        self._number, self._session, self._rest = 0, None, b""
        self.requests, self.messages = [], []
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self):
        os.close(self._out)  # at which Chromium ends
        self._process.wait(30)
        os.close(self._in)

    def send(self, method, **params):
        """Sends a command, and returns its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer)

    def _next(self):
        """Returns the next message of the browser."""
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], PATIENCE_S)[0], "no answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event):
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.messages.append(params["exceptionDetails"])
            case "Runtime.consoleAPICalled":
                self.messages.append(params["args"])
            case "Log.entryAdded" if params["entry"]["source"] != "network":
                self.messages.append(params["entry"]["text"])

    def open(self, url):
        """Opens a page, and waits until it is loaded."""
        self.send("Page.navigate", url=url)
        here = f"location.href === {json.dumps(url)}"
        self.until(f"{here} && document.readyState === 'complete'")

    def reload(self):
        """Loads the page again, and waits until it is loaded."""
        self.run("window.before = true; location.reload()")
        self.until("!window.before && document.readyState === 'complete'")

    def run(self, expression):
        """Returns the value of a JavaScript expression."""
        found = self.send(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression, seconds=30):
        """Waits until an expression is true. Returns its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(expression):
                return value
            time.sleep(0.02)
        raise AssertionError(f"{expression}: {self.run('document.body.innerText')}")

    def type(self, text):
        """Types text where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, key, shift=False):
        """Presses a key where the focus is."""
        code, text = KEYS[key]
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def look(self, width, height, dark=False, scale=1, phone=False):
        """Sets the size of the window and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.send("Emulation.setDeviceMetricsOverride", **size, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self):
        """Returns the window as a PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot")["data"])
