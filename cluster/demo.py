"""`pdserve demo`: one chat prompt through the public gRPC API, then a picture of where its time went."""

from __future__ import annotations

from typing import Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table

from cluster.deployment import until_ready
from cluster.display import Display
from cluster.plan import Plan
from cluster.private_run import private_run
from cluster.up import UpOptions, deploy
from common.lifecycle import Stage
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc
from common.rpc import new_channel, typed_errors

TIMEOUT_S = 120.0
STAGE_ORDER = [str(stage) for stage in Stage]


def run_demo(options: UpOptions, prompt: str, max_tokens: int, console: Console) -> int:
    with private_run(options) as (options, key):

        async def work(plan: Plan, display: Display) -> None:
            await until_ready(plan, display)
            display.ready(plan)
            await chat(plan.grpc_address, key, prompt, max_tokens, console)

        deploy(options, console, work)
    return 0


async def chat(grpc_address: str, api_key: str, prompt: str, max_tokens: int, console: Console) -> None:
    """Stream one greedy answer to the terminal and draw its timeline. Raises: ServingError."""
    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )
    last = pb.GenerateResponse()
    console.print(f"\n> {prompt}", style="bold", highlight=False, markup=False)
    async with new_channel(grpc_address) as channel:
        inference: Any = serving_pb2_grpc.InferenceStub(channel)
        with typed_errors(f"the router at {grpc_address}"):
            metadata = (("authorization", f"Bearer {api_key}"),)
            async for last in inference.Generate(request, timeout=TIMEOUT_S, metadata=metadata):
                console.print(last.text, end="", highlight=False, markup=False, soft_wrap=True)
    console.print("\n")
    console.print(timeline(last.timings))
    console.print(summary(last), highlight=False, markup=False, soft_wrap=True)


def timeline(timings: pb.Timings) -> RenderableType:
    """One bar per stage, on a common time axis."""
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("when", width=50)
    begin_s = 0.0
    for stage in sorted(timings.stages, key=lambda stage: STAGE_ORDER.index(stage.name)):
        end_s = begin_s + stage.seconds
        bar = Bar(size=max(timings.end_to_end_s, end_s), begin=begin_s, end=end_s, width=50)
        table.add_row(stage.name, f"{stage.seconds:.4f}", bar)
        begin_s = end_s
    return Group(table)


def summary(last: pb.GenerateResponse) -> str:
    timings, usage = last.timings, last.usage
    who = f"prefill on {timings.prefill_worker}, decode on {timings.decode_worker}"
    if not timings.prefill_worker:
        who = f"prefill and decode on {timings.decode_worker}"
    return (
        f"TTFT {timings.ttft_s * 1e3:.0f} ms, TPOT {timings.tpot_s * 1e3:.1f} ms, total {timings.end_to_end_s:.2f} s\n"
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tokens out ({last.finish_reason}); {who}"
    )
