"""A headless Chromium, driven over its DevTools protocol through a pipe: no driver, no port, no library.

The protocol: JSON messages that end with a zero byte, commands on the browser's descriptor 3, answers and events on 4
(https://chromedevtools.github.io/devtools-protocol).
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

START_S = 60.0  # on busy cores
COMMAND_S = 30.0
FIRST_FREE_FD = 10  # below that a shell's redirections could overwrite them

FOUND = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
OPTIONS = [
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
    *(["--no-sandbox"] if os.geteuid() == 0 else []),  # it refuses to sandbox itself for root
]


class BrowserError(Exception):
    """What the page threw, or what the browser answered instead of a result."""


class Page:
    """One tab. `complaints` collects what a developer would see in red in its console."""

    def __init__(self, commands: int, answers: asyncio.StreamReader) -> None:
        self.complaints: list[str] = []
        self.requested: list[str] = []  # URLs
        self._commands = commands
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._reading = asyncio.create_task(self._read(answers))

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is. Raises: BrowserError."""
        answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, script: str, timeout_s: float = COMMAND_S) -> Any:
        """Wait until an expression is true, and return its value."""
        end_s = time.monotonic() + timeout_s
        while not (value := await self.evaluate(script)):
            assert time.monotonic() < end_s, f"not within {timeout_s} s: {script}"
            await asyncio.sleep(0.05)
        return value

    async def look(self, width: int, *, is_dark: bool) -> None:
        """From now on as on a screen of that width, with that taste."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        answer = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    async def attach(self) -> None:
        """Make the tab."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = await asyncio.wait_for(self._waiting[number], START_S)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def _read(self, answers: asyncio.StreamReader) -> None:
        while True:
            message = json.loads((await answers.readuntil(b"\0"))[:-1])
            if "id" in message:
                self._waiting.pop(message["id"]).set_result(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, params: dict[str, Any]) -> None:
        match event:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Page]:
    """A fresh browser with one empty tab. profile: an empty folder."""
    assert FOUND is not None
    (its_commands, commands), (answers, its_answers) = _high(*os.pipe()), _high(*os.pipe())
    redirect = f'exec "$0" "$@" 3<&{its_commands} 4>&{its_answers}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", redirect, FOUND, *OPTIONS, f"--user-data-dir={profile}"),
        pass_fds=(its_commands, its_answers),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # so that its children can be ended with it
    )
    os.close(its_commands)
    os.close(its_answers)
    reader = asyncio.StreamReader(limit=2**27)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers, "rb"))
    page = Page(commands, reader)
    try:
        await page.attach()
        yield page
    finally:
        await page.close()
        os.close(commands)  # which is the browser's end
        try:
            await asyncio.wait_for(process.wait(), COMMAND_S)
        except TimeoutError:
            os.killpg(process.pid, 9)
            await process.wait()
        transport.close()


def _high(read: int, write: int) -> tuple[int, int]:
    """The same pipe on descriptors that no shell uses for itself."""
    ends = (
        fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD),
        fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD),
    )
    os.close(read)
    os.close(write)
    return ends
