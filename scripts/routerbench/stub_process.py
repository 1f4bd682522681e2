"""The stub workers' process, driven by orders over a pipe. One answer to each order."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from common.config import Role
from routerbench.stub_workers import Pace, Stage, StubWorker

ANSWER_S = 60.0
END_S = 10.0


@dataclass(frozen=True)
class Start:
    """These workers, at this router, instead of those that ran before. Answered with their addresses."""

    roles: tuple[Role, ...]
    router_address: str
    model: str
    vocab_size: int
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class SetPace:
    pace: Pace


@dataclass(frozen=True)
class TakeTimes:
    """Answered with when each token left, by request id, and forgotten here."""


Order = Start | SetPace | TakeTimes
SentTimes = dict[str, list[float]]
Answer = list[str] | SentTimes | None | Exception


class StubProcess:
    """`with StubProcess() as stubs:` the process lives as long as the block, however that ends."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs,), name="routerbench-stubs", daemon=True)
        self._process.start()
        theirs.close()  # so that its death ends our wait

    def __enter__(self) -> StubProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()  # asks it to end
        self._process.join(END_S)
        self._process.kill()
        self._process.join()

    async def start(self, order: Start) -> list[str]:
        addresses = await self._ask(order)
        assert isinstance(addresses, list)
        return addresses

    async def set_pace(self, pace: Pace) -> None:
        await self._ask(SetPace(pace))

    async def take_times(self) -> SentTimes:
        times = await self._ask(TakeTimes())
        assert isinstance(times, dict)
        return times

    async def _ask(self, order: Order) -> list[str] | SentTimes | None:
        """Raises: whatever the other process raised, ConnectionError when it has died."""
        self._connection.send(order)
        if not await asyncio.to_thread(self._connection.poll, ANSWER_S):
            raise ConnectionError(f"the stub workers did not answer within {ANSWER_S:.0f} s")
        try:
            answer: Answer = self._connection.recv()
        except EOFError as error:
            raise ConnectionError("the stub workers' process died") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _main(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the bench's, which then ends the pipe
    asyncio.run(_serve(connection))


async def _serve(connection: Connection) -> None:
    async with _Workers() as workers:
        while True:
            try:
                order: Order = await asyncio.to_thread(connection.recv)
            except EOFError:
                return
            try:
                answer: Answer = await workers.follow(order)
            except Exception as error:  # the boundary of the process
                answer = RuntimeError(repr(error))
            try:
                connection.send(answer)
            except OSError:  # nobody waits for it any more
                return


class _Workers:
    """At most one set of them."""

    def __init__(self) -> None:
        self._stage: Stage | None = None
        self._running = AsyncExitStack()

    async def __aenter__(self) -> _Workers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._running.aclose()

    async def follow(self, order: Order) -> Answer:
        match order:
            case Start():
                return await self._start(order)
            case SetPace(pace):
                self._opened.pace = pace
                return None
            case TakeTimes():
                taken, self._opened.sent_s = self._opened.sent_s, {}
                return taken

    @property
    def _opened(self) -> Stage:
        assert self._stage is not None, "Start comes first"
        return self._stage

    async def _start(self, order: Start) -> list[str]:
        await self._running.aclose()
        stage = self._stage = Stage(order.model, order.vocab_size, order.answer_ids)
        addresses = []
        for number, role in enumerate(order.roles):
            worker = await StubWorker.start(role, f"{role}-{number}", stage, order.router_address)
            self._running.push_async_callback(worker.stop)
            addresses.append(worker.address)
        return addresses
