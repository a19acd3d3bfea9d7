"""Chromium without a window, driven over a pipe by its DevTools protocol: all it takes is a Chromium on the PATH."""

import argparse
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from PIL import Image

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --hide-scrollbars".split()
COLOURS = 256  # of a picture: a page has few, and edges of letters
READ, WRITE = 3, 4  # the file descriptors that Chromium listens and answers on
CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36, "Tab": 9}


def find():
    """Path of a Chromium, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser; a context manager.

    Attributes: errors: of scripts, in words.  asked: addresses that the page wanted to load.
    """

    def __init__(self, width=1280, height=900):
        self.size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.errors, self.asked, self.number, self.rest, self.session = [], [], 0, b"", None

    def __enter__(self):
        orders, self.orders = os.pipe()
        self.answers, answers = os.pipe()
        ends = [os.dup(end) for end in (orders, answers)]  # apart from what they are to become

        def connect():
            for end, wanted in zip(ends, (READ, WRITE)):
                os.dup2(end, wanted)

        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # its processes outlive it by a moment
        command = [find(), *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(READ, WRITE), preexec_fn=connect, **quiet)
        for end in (orders, answers, *ends):
            os.close(end)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", **self.size)
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait(30)
        os.close(self.orders)
        os.close(self.answers)
        self.folder.cleanup()

    def send(self, method, **params):
        """One order. Returns its result."""
        self.number += 1
        order = {"id": self.number, "method": method, "params": params}
        if self.session:
            order["sessionId"] = self.session
        os.write(self.orders, json.dumps(order).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.number:
                assert "error" not in message, message["error"]
                return message["result"]

    def message(self):
        """The next one; events are noted."""
        while b"\0" not in self.rest:
            more = os.read(self.answers, 1 << 16)
            assert more, "the browser has ended"
            self.rest += more
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        return message

    def open(self, path, dark=False):
        """Open a file, and wait until its data is there."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=Path(path).resolve().as_uri())
        deadline = time.monotonic() + 30
        while not self.run("document.readyState === 'complete' && typeof ready !== 'undefined'"):
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)
        self.run("ready")

    def run(self, expression):
        """The value of an expression in the page, awaited if it is a promise."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key, times=1):
        """Press a key, as a person does."""
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=CODES[key])

    def click(self, selector):
        """Click into the middle of an element."""
        x, y = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector):
        """Bring an element into sight and move the mouse over it. Returns: where that is."""
        one = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{one}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({one}.getBoundingClientRect())")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def text(self, selector):
        """What an element says."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def screenshot(self, path, whole=False):
        """Write a PNG of what is seen, or of the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))


def main():
    """`python -m tests.browser view.html picture.png [--dark]`: a picture of a page that `fastkv view` wrote."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=main.__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true", help="as a dark desktop shows it")
    parser.add_argument("--size", type=int, nargs=2, default=(1200, 1440), metavar=("WIDTH", "HEIGHT"))
    options = parser.parse_args()
    if find() is None:
        parser.error(f"none of {', '.join(NAMES)} is on the PATH")
    with Browser(*options.size) as browser:
        browser.open(options.page, options.dark)
        browser.screenshot(options.picture)
    Image.open(options.picture).quantize(COLOURS).save(options.picture, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    main()
