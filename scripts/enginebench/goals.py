"""What is asked of the engine: SmolLM2-135M in bfloat16 on two cores with AVX512-BF16, with one thread and with two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Goal:
    sign: Literal["<=", ">="]
    bound: float

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.sign == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


COMMON = {
    "decode_1x64.tpot": Goal("<=", 15),
    "decode_1x64.read_share": Goal(">=", 0.7),
    "decode_1x64.python_share": Goal("<=", 0.1),
    "decode_8.context_cost": Goal("<=", 2),
    "prefill_512.multiply_share": Goal(">=", 0.75),
    "prefill_2048.multiply_share": Goal(">=", 0.75),
}
RATES = {
    1: {"decode_32x64.rate": 560, "prefill_512.rate": 750, "prefill_2048.rate": 650},
    2: {"decode_32x64.rate": 900, "prefill_512.rate": 1500, "prefill_2048.rate": 1300},
}


def goals_for(num_threads: int) -> dict[str, Goal]:
    """By key of a figure; none for other numbers of threads."""
    if num_threads not in RATES:
        return {}
    return COMMON | {key: Goal(">=", rate) for key, rate in RATES[num_threads].items()}
