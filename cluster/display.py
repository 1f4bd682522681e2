"""What a person sees of a deployment: settled lines, and on a terminal one moving line below them."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from cluster.plan import Plan
from cluster.supervisor import MemberDied, MemberDropped, MemberEvent, MemberLeft
from common.pb import serving_pb2 as pb

CURL = """curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""


class Display:
    """`with Display(console) as display:`. Where there is no terminal the moving line is left out."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start_s = time.monotonic()
        self._doing = "starting"
        self._moving_line = Live(Spinner("dots", self), console=console, transient=True, redirect_stdout=False)
        self._incarnations: dict[str, str] = {}  # of the workers that have been announced
        self._refusals: set[str] = set()  # that have been announced

    def __enter__(self) -> Display:
        self._moving_line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._moving_line.stop()

    def __rich__(self) -> str:
        """The moving line, as rich asks for it several times a second."""
        return f"{self._doing} ({self._elapsed_s:.0f} s)"

    def doing(self, text: str) -> None:
        self._doing = text

    def settled(self, text: str) -> None:
        # soft_wrap: a folded command line cannot be pasted
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def member_event(self, event: MemberEvent) -> None:
        if isinstance(event, MemberLeft):
            self.settled(f"{event.spec.name} has left")
        if isinstance(event, MemberDropped):
            self.settled(f"{event.spec.name} is given up: {event.reason}")
        if isinstance(event, MemberDied):
            ending = event.ending
            self.settled(f"{event.spec.name} died ({ending.reason}), starting again in {event.restart_in_s:.1f} s")
            for line in ending.last_words.splitlines():
                self.settled(f"  | {line}")

    def cluster_status(self, status: pb.ClusterStatus, plan: Plan) -> None:
        """Announce every worker once per life and every refused pair, and say who is still awaited."""
        for worker in status.workers:
            hello = worker.hello
            if self._incarnations.get(hello.worker_id) != hello.incarnation:
                self._incarnations[hello.worker_id] = hello.incarnation
                self.settled(f"{hello.worker_id} registered, {hello.address} ({self._elapsed_s:.1f} s)")
        for pair in status.pairs:
            if pair.standing == pb.PAIR_REFUSED and pair.reason not in self._refusals:
                self._refusals.add(pair.reason)
                self.settled(pair.reason)
        awaited = set(plan.worker_names) - {worker.hello.worker_id for worker in status.workers}
        if awaited:
            self.doing(f"loading {', '.join(sorted(awaited))}")
        elif not status.is_ready:
            self.doing(f"waiting: {status.reason}")

    def ready(self, plan: Plan) -> None:
        self._moving_line.stop()
        self.settled(f"ready in {self._elapsed_s:.1f} s")
        self.settled(f"  OpenAI API  {plan.http_url}/v1")
        self.settled(f"  gRPC        {plan.grpc_address}")
        for url in plan.dashboard_urls:
            self.settled(f"  dashboard   {url}")
        self.settled(CURL.format(url=plan.http_url, model=plan.config.model.served_name))

    def stopping(self, plan: Plan) -> None:
        bound = f"for at most {plan.longest_drain_s:g} s; Ctrl-C again stops at once"
        self.settled(f"stopping once what is being answered has ended, {bound}")

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s
