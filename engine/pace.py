"""How long steps take, as measured, and how much of a prompt fits into one beside running streams.

step time ≈ prompt_fit(prompt tokens) + slope of decode_fit · decoding sequences
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_PROMPT_TOKENS = 16  # in a step that has any: prompts move on whatever the streams' goal
GOAL_SHARE = 0.9  # of the goal is planned for; the rest is what the router and the wire add
TRUSTED_SHARE = 4  # a rate counts once a step had a quarter of the tokens that a step may have
DECODE_MEMORY, PROMPT_MEMORY = 0.98, 0.95  # what a point weighs after the next one: some 50 and 20 steps are remembered
# Whatever disturbs a step makes it longer: one that took less than this part of what was foreseen is the better
# witness, and all that is remembered is brought nearer to it by that part of the difference.
QUICK_SHARE, QUICK_WEIGHT = 0.7, 0.3
MIN_SPREAD = 0.01  # variance of x over its mean squared, below which points count as all the same


class Pace:
    """Only the engine's thread writes it."""

    def __init__(self, max_num_batched_tokens: int, tpot_goal_s: float | None = None) -> None:
        """tpot_goal_s: running streams' time between tokens, which prompts computed beside them should leave alone."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self._tpot_goal_s = tpot_goal_s
        self._decode_fit = LineFit(DECODE_MEMORY)
        self._prompt_fit = LineFit(PROMPT_MEMORY)

    def observe(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        if num_prompt_tokens == 0:
            self._decode_fit.add(num_decodes, seconds)
        else:
            prompt_s = max(0.0, seconds - self._decode_fit.line()[1] * num_decodes)
            foreseen_s = self._prompt_fit.at(num_prompt_tokens)
            if prompt_s < QUICK_SHARE * foreseen_s:
                self._prompt_fit.scale(1 - QUICK_WEIGHT * (1 - prompt_s / foreseen_s))
            self._prompt_fit.add(num_prompt_tokens, prompt_s)

    def prompt_budget(self, num_decodes: int) -> int:
        """Prompt tokens that a step with as many decoding sequences may compute."""
        room = self.max_num_batched_tokens - num_decodes
        base_s, token_s = self._prompt_fit.line()
        if self._tpot_goal_s is None or num_decodes == 0 or token_s == 0:
            return room
        spare_s = GOAL_SHARE * self._tpot_goal_s - self._decode_fit.line()[1] * num_decodes - base_s
        return min(room, max(MIN_PROMPT_TOKENS, int(spare_s / token_s)))

    def prefill_s_per_token(self) -> float:
        """Of a full step without streams; 0 while no step was long enough to tell."""
        most = self.max_num_batched_tokens
        if self._prompt_fit.largest_x * TRUSTED_SHARE < most:
            return 0.0
        base_s, token_s = self._prompt_fit.line()
        return base_s / most + token_s

    def decode_step_s(self, num_decodes: int) -> float:
        """Of a step without prompts; 0 while there was none."""
        return self._decode_fit.at(num_decodes)


@dataclass
class LineFit:
    """y ≈ intercept + slope · x by least squares, where a point's weight falls by `memory` with each later one.

    Both are never negative. Points that all have nearly the same x tell one number only: it is all taken for slope, so
    that what is foreseen for a larger x is too much rather than too little.
    """

    memory: float
    largest_x: float = 0.0
    _weight: float = field(default=0.0, init=False)
    _x: float = field(default=0.0, init=False)
    _y: float = field(default=0.0, init=False)
    _xx: float = field(default=0.0, init=False)
    _xy: float = field(default=0.0, init=False)

    def add(self, x: float, y: float) -> None:
        """x > 0."""
        self.largest_x = max(self.largest_x, x)
        self._weight = self.memory * self._weight + 1
        self._x = self.memory * self._x + x
        self._y = self.memory * self._y + y
        self._xx = self.memory * self._xx + x * x
        self._xy = self.memory * self._xy + x * y

    def scale(self, factor: float) -> None:
        """The whole line."""
        self._y *= factor
        self._xy *= factor

    def at(self, x: float) -> float:
        intercept, slope = self.line()
        return intercept + slope * x

    def line(self) -> tuple[float, float]:
        """Intercept and slope; zeros before the first point."""
        if self._weight == 0:
            return 0.0, 0.0
        spread = self._weight * self._xx - self._x**2
        if spread > MIN_SPREAD * self._x**2:
            slope = (self._weight * self._xy - self._x * self._y) / spread
            intercept = (self._y - slope * self._x) / self._weight
            if slope > 0 and intercept >= 0:
                return intercept, slope
        return 0.0, self._xy / self._xx
