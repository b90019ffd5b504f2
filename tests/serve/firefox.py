"""Drives Debian's Firefox through Marionette, its own remote protocol.

Playwright drives only its own build of Firefox, and the driver for WebDriver is not in Debian. Marionette needs neither:
it is a socket on which JSON messages go back and forth.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The name under which WebDriver passes elements."""
PREFERENCES = {
    "marionette.port": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.page": 0,
    "app.update.disabledForTesting": True,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "browser.cache.disk.enable": False,
}


class FirefoxError(Exception):
    """What Firefox says went wrong."""


class Firefox:
    """One window. Scripts are bodies of functions; their arguments are JSON values."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = connection.makefile("rb")
        self._number = 0
        self._receive()  # the greeting
        self.send("WebDriver:NewSession", {"capabilities": {"alwaysMatch": {"acceptInsecureCerts": True}}})
        self.send("WebDriver:SetTimeouts", {"script": 120_000, "pageLoad": 120_000, "implicit": 0})

    def send(self, command: str, values: dict[str, Any] | None = None) -> Any:
        self._number += 1
        data = json.dumps([0, self._number, command, values or {}]).encode()
        self._connection.sendall(str(len(data)).encode() + b":" + data)
        _, _, error, result = self._receive()
        if error:
            raise FirefoxError(f"{command}: {error['error']}: {error['message']}")
        return result.get("value", result) if isinstance(result, dict) else result

    def _receive(self) -> Any:
        length = b""
        while (character := self._read.read(1)) != b":":
            length += character
        return json.loads(self._read.read(int(length)))

    def open(self, address: str) -> None:
        self.send("WebDriver:Navigate", {"url": address})

    def run(self, body: str, *arguments: Any) -> Any:
        """Run a script that may wait (`await`) and return its result."""
        ends = "(value) => done({ value }), (error) => done({ error: String(error) })"
        script = f"const done = arguments[arguments.length - 1]; (async (...args) => {{ {body} }})(...arguments).then({ends});"
        answer = self.send("WebDriver:ExecuteAsyncScript", {"script": script, "args": list(arguments), "sandbox": None})
        if "error" in answer:
            raise FirefoxError(answer["error"])
        return answer.get("value")

    def wait(self, condition: str, *arguments: Any, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition});", *arguments):
            if time.monotonic() > end:
                shown = self.run("return document.body.innerText.slice(0, 2000);")
                raise AssertionError(f"not within {seconds} s: {condition}\n{shown}")
            time.sleep(0.1)

    def choose(self, selector: str, paths: Sequence[Path]) -> None:
        """Choose files in a file input, as a person does in its dialog."""
        self.press(selector, "\n".join(map(str, paths)))

    def press(self, selector: str, keys: str) -> None:
        element = self.send("WebDriver:FindElement", {"using": "css selector", "value": selector})
        self.send("WebDriver:ElementSendKeys", {"id": element[ELEMENT], "text": keys})

    def privileged(self, body: str, *arguments: Any) -> Any:
        """Run a script with the rights of the browser itself, for example to go offline."""
        self.send("Marionette:SetContext", {"value": "chrome"})
        try:
            return self.send("WebDriver:ExecuteScript", {"script": body, "args": list(arguments)})
        finally:
            self.send("Marionette:SetContext", {"value": "content"})

    def offline(self, away: bool) -> None:
        self.privileged("Services.io.offline = arguments[0];", away)


@contextmanager
def firefox(profile: Path, **preferences: Any) -> Iterator[Firefox]:
    """A Firefox of its own, without a screen, with an empty profile."""
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    profile.mkdir(parents=True, exist_ok=True)
    settings = PREFERENCES | preferences
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in settings.items()]
    (profile / "user.js").write_text("\n".join(lines))
    command = [program, "--headless", "--marionette", "--remote-allow-system-access", "--no-remote", "--profile", str(profile)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Firefox(_connect(profile / "MarionetteActivePort", process))
    finally:
        process.terminate()
        process.wait(30)


def _connect(file: Path, process: subprocess.Popen[bytes], seconds: float = 90) -> socket.socket:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and (port := file.read_text().strip()):
            connection = socket.create_connection(("127.0.0.1", int(port)), timeout=180)
            connection.settimeout(180)
            return connection
        time.sleep(0.1)
    raise AssertionError("Firefox did not start")
