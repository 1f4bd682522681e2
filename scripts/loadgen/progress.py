"""What a person sees while a run goes on: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from loadgen.record import RequestRecord

WINDOW_S = 10.0
LINE_EVERY_S = 5.0
REFRESH_EVERY_S = 0.2


class RunView:
    """The records so far, and the current rate and latencies over the last ten seconds."""

    def __init__(self, label: str, num_requests: int | None, clock: Callable[[], float]) -> None:
        self.label = label
        self.num_requests = num_requests
        self.records: list[RequestRecord] = []
        self._clock = clock
        self._start_s = clock()
        self._num_started = 0
        self._num_failed = 0
        self._recent: deque[tuple[float, RequestRecord]] = deque()

    def started(self) -> None:
        self._num_started += 1

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)
        self._num_failed += not record.is_completed
        self._recent.append((self._clock(), record))

    def line(self) -> str:
        now_s = self._clock()
        while self._recent and self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()
        recent = [record for _, record in self._recent if record.is_completed]
        window_s = max(min(WINDOW_S, now_s - self._start_s), 1e-9)
        of = "" if self.num_requests is None else f"/{self.num_requests}"
        return (
            f"{len(self.records)}{of} done  {self._num_started - len(self.records)} in flight"
            f"  {self._num_failed} failed  {len(recent) / window_s:.2f} req/s"
            f"  TTFT {_mean_ms(record.ttft_s for record in recent)}"
            f"  TPOT {_mean_ms(record.tpot_s for record in recent)}"
        )


@asynccontextmanager
async def shown(view: RunView, console: Console) -> AsyncIterator[None]:
    """Show `view` on `console` until the block ends."""
    if not console.is_terminal:

        def print_line() -> None:
            console.print(f"{view.label}  {view.line()}", highlight=False, markup=False, soft_wrap=True)

        async with _every(LINE_EVERY_S, print_line):
            yield
        return
    with _bar(console) as progress:
        task_id = progress.add_task(view.label, total=view.num_requests, line="")

        def refresh() -> None:
            progress.update(task_id, completed=len(view.records), line=view.line())

        async with _every(REFRESH_EVERY_S, refresh):
            yield


@asynccontextmanager
async def _every(period_s: float, action: Callable[[], None]) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(period_s)
            action()

    task = asyncio.create_task(repeat())
    try:
        yield
        action()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[line]}", markup=False),
        TimeElapsedColumn(),
        console=console,
    )


def _mean_ms(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{1000 * sum(known) / len(known):.1f} ms" if known else "–"
