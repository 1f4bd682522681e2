"""What is asked of the engine: SmolLM2-135M in bfloat16 on two cores with AVX512-BF16, with one thread and with two."""

from __future__ import annotations

from bench_goal import Goal

COMMON = {
    "decode_1x64.tpot": Goal("<=", 15),
    "decode_1x64.read_share": Goal(">=", 0.7),
    "decode_1x64.python_share": Goal("<=", 0.1),
    "decode_8.context_cost": Goal("<=", 2),
    "prefill_512.multiply_share": Goal(">=", 0.75),
    "prefill_2048.multiply_share": Goal(">=", 0.75),
    "prefill_in_chunks_512.multiply_share": Goal(">=", 0.75),
    "prefill_in_chunks_2048.multiply_share": Goal(">=", 0.75),
    "sampling_temperature_32.step_share": Goal("<=", 0.1),
    "sampling_top_p_32.step_share": Goal("<=", 0.2),
    "sampling_top_k_32.step_share": Goal("<=", 0.2),
}
DECODE_RATE = {1: 560, 2: 900}  # by number of threads, batch 32
PREFILL_RATES = {1: {512: 750, 2048: 650}, 2: {512: 1500, 2048: 1300}}  # by prompt length, whole and in chunks


def goals_for(num_threads: int) -> dict[str, Goal]:
    """By key of a figure; none for other numbers of threads."""
    if num_threads not in DECODE_RATE:
        return {}
    rates = {"decode_32x64.rate": DECODE_RATE[num_threads]}
    for length, rate in PREFILL_RATES[num_threads].items():
        rates |= {f"prefill_{length}.rate": rate, f"prefill_in_chunks_{length}.rate": rate}
    return COMMON | {key: Goal(">=", rate) for key, rate in rates.items()}
