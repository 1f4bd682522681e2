"""The one thread on which an engine lives."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.engine import Engine, StepObserver

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineStopped(RuntimeError):
    """The command came after the engine's end."""


class EngineLoop:
    """Runs commands between steps, steps while there is work, sleeps otherwise.

    If a step raises, the engine's state can no longer be trusted: `on_crash` is called once, on the engine's thread,
    and every later command fails with the same error. The worker is expected to end its process.
    """

    def __init__(self, engine: Engine, observer: StepObserver, on_crash: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._observer = observer
        self._on_crash = on_crash
        self._commands: queue.SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._crash: BaseException | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Callable[[Engine], T]) -> Future[T]:
        """Run `command(engine)` between two steps, after everything submitted before it. Never waits for ever: once
        the loop has stopped, commands fail with EngineStopped."""
        future: Future[T] = Future()
        self._commands.put((command, future))
        if self._is_stopped:
            self._fail_queued()
        return future

    def stop(self, timeout_s: float = 30.0) -> None:
        """Finish the step in progress, then end the thread. Commands still queued fail with EngineStopped."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        can_step = False
        while self._run_commands(must_wait=not can_step):
            can_step = False
            if self._engine.has_work and self._crash is None:
                try:
                    can_step = self._engine.step(self._observer)
                except Exception as error:
                    logger.exception("the engine's step failed; this worker cannot go on")
                    self._crash = error
                    self._on_crash(error)
        self._is_stopped = True
        self._fail_queued()

    def _run_commands(self, *, must_wait: bool) -> bool:
        """Run what is queued, waiting for the first command if there is nothing to step. False: stop."""
        while True:
            try:
                item = self._commands.get(block=must_wait)
            except queue.Empty:
                return True
            if item is None:
                return False
            self._run_command(*item)
            must_wait = False

    def _run_command(self, command: Callable[[Engine], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self._crash is not None:
            future.set_exception(self._crash)
            return
        try:
            future.set_result(command(self._engine))
        except Exception as error:  # handed to whoever submitted the command
            future.set_exception(error)

    def _fail_queued(self) -> None:
        while True:
            try:
                item = self._commands.get_nowait()
            except queue.Empty:
                return
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(EngineStopped("the engine has stopped"))
