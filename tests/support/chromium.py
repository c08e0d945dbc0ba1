"""A page in headless Chromium, opened from disk, and what it requests and says on its console.

Chromium is driven over a pipe (Chrome DevTools Protocol, `--remote-debugging-pipe`), so no port is opened and no
package is needed beside the browser.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank"),
)
TIMEOUT_S = 60.0


AS_THREE_AND_FOUR = """
import os, sys
commands, answers = (os.dup(int(number)) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.set_inheritable(3, True)  # dup2 leaves a descriptor as it is that has the right number already
os.set_inheritable(4, True)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Becomes Chromium, which reads commands from descriptor 3 and answers on 4."""


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium, with all that it requested and all that its console said.

    `requests`: addresses in the order of the requests. `errors`: console errors and exceptions, in words."""

    def __init__(self, program: str, width: int = 1240, height: int = 900) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded, self._number, self._session = False, 0, ""
        self._profile = tempfile.mkdtemp(prefix="report-browser-")
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()

        command = [program, *FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", AS_THREE_AND_FOUR, str(read_end), str(write_end), *command],
            pass_fds=(read_end, write_end), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        os.set_blocking(self._from, False)
        self._buffer = b""

    def open(self, path: Path, *, scheme: str = "light") -> None:
        """Load a file of this machine and wait until it is drawn. `scheme`: light or dark."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait(lambda: self._loaded, "the page to load")

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def screenshot(self, path: Path, width: int, height: int) -> None:
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result. Raise RuntimeError if Chromium refuses it."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answers: list[dict[str, Any]] = []
        self._wait(lambda: bool(answers), method, lambda one: answers.append(one) if one.get("id") == number else None)
        if "error" in answers[0]:
            raise RuntimeError(f"{method}: {answers[0]['error']}")
        return dict(answers[0]["result"])

    def _wait(self, done: Any, what: str, see: Any = lambda one: None) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"Chromium did not answer: {what}")
            try:
                self._buffer += os.read(self._from, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
            *messages, self._buffer = self._buffer.split(b"\0")
            for text in messages:
                one = json.loads(text)
                see(one)
                self._note(one.get("method", ""), one.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)
