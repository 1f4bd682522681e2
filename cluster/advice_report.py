"""The doctor's measurements and advice, as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE
from rich.table import Table

from cluster.split_advice import MIN_STREAMS, Advice, Verdict
from cluster.trial import Measured


def measured_lines(measured: Measured) -> Iterator[str]:
    speeds, link = measured.speeds, measured.link
    rates = [prompt.num_tokens / prompt.prefill_s for prompt in measured.prompts]
    spread = f" to {max(rates):,.0f}" if max(rates) > 1.05 * min(rates) else ""
    yield f"prefill  {min(rates):,.0f}{spread} tokens/s"
    yield f"decode   {speeds.step_s * 1e3:.1f} ms a step with {_counted(speeds.num_streams, 'stream')}"
    if link.bytes_per_s:
        speed, round_trip = link.bytes_per_s / 1e9, link.round_trip_s * 1e3
        yield f"link     {link.transport}, {speed:.2f} GB/s, round trip {round_trip:.2f} ms"


def advice_table(advice: Sequence[Advice]) -> Table:
    title = "Does splitting pay? Times in ms; gap: between the tokens of running streams, beside such a prompt"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for column in ("prompt", "KV, MB", "prefill", "handoff", "gap, colocated", "split", "P : D"):
        table.add_column(column, justify="right")
    table.add_column("advice")
    for each in advice:
        prompt = each.prompt
        table.add_row(
            f"{prompt.num_tokens:,}",
            f"{prompt.kv_bytes / 1e6:.1f}",
            f"{prompt.prefill_s * 1e3:,.0f}",
            f"{prompt.handoff_s * 1e3:.1f}",
            f"{each.colocated_gap_s * 1e3:.0f}",
            f"{each.split_gap_s * 1e3:.0f}",
            _ratio(each),
            each.verdict.value,
        )
    return table


def summary(advice: Sequence[Advice], tpot_goal_s: float, num_cores: int) -> Iterator[str]:
    for each in advice:
        yield f"{each.prompt.num_tokens:,} tokens, {each.verdict.value}: {each.reason}."
    if any(each.colocated_gap_s >= 0.99 * tpot_goal_s for each in advice):
        goal = f"slo.tpot_s, {tpot_goal_s * 1e3:.0f} ms"
        yield f"(Colocated workers cut prompts into parts so small that running streams keep to {goal}.)"
    split = [each for each in advice if each.verdict is Verdict.SPLIT]
    if not split:
        yield "Nothing here speaks for splitting: pdserve up --prefill 0 --decode 0 --colocated N."
        return
    yield _start_with(split[len(split) // 2])
    yield (
        f"Splitting buys steady streams, not throughput: more workers on this machine share its {num_cores} cores, "
        "and all of those in one answer a lone request sooner (--prefill 0 --decode 0 --colocated 1)."
    )


def _start_with(advice: Advice) -> str:
    if advice.ratio is None:
        return (
            "With how many workers to start depends on how many streams a decode worker carries at a time: ask again "
            f"while {MIN_STREAMS} or more run on one, or stop this deployment: pdserve doctor then tries its own pair."
        )
    prefill, decode, is_most = advice.ratio
    return (
        f"For prompts of about {advice.prompt.num_tokens:,} tokens and answers of {advice.prompt.output_tokens}, start "
        f"with {'at least ' if is_most else ''}{_counted(prefill, 'prefill worker')} and "
        f"{_counted(decode, 'decode worker')}, each with a device or cores of its own, and let scripts/load_test.py "
        "--sweep decide from there."
    )


def _ratio(advice: Advice) -> str:
    if advice.ratio is None or advice.verdict is Verdict.COLOCATE:
        return "-"
    prefill, decode, is_most = advice.ratio
    more = "+" if is_most else ""
    return f"{prefill}{more} : {decode}" if prefill > decode else f"{prefill} : {decode}{more}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
