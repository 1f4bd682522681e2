"""What clients ask for: prompts of several lengths, some with a common beginning, greedy and seeded answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from loadgen.workload import WORDS, LengthRange

NUM_PREFIXES = 4
PREFIX_WORDS = 60
LENGTHS_IN_WORDS = (4, 30, 120, 300)
STOP_CHARACTERS = 3
REPLACEMENT = "\ufffd"  # stands for bytes that are no text


@dataclass(frozen=True)
class Ask:
    """A request whose answer is determined: greedy, or sampled with its own seed."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    stop: str | None = None

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "stop": self.stop,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True)
class Answer:
    """Everything of an answer that must be the same however it came about."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def make_asks(seed: int, num_asks: int, output_tokens: LengthRange) -> list[Ask]:
    random = Random(seed)
    prefixes = [_words(random, PREFIX_WORDS) for _ in range(NUM_PREFIXES)]
    asks = []
    for index in range(num_asks):
        prefix = random.choice(prefixes) if random.random() < 0.6 else ""
        asks.append(
            Ask(
                prompt=f"{prefix} {_words(random, LENGTHS_IN_WORDS[index % len(LENGTHS_IN_WORDS)])}".strip(),
                max_tokens=random.randint(output_tokens.low, output_tokens.high),
                temperature=random.choice((0.0, 0.8)),
                seed=random.getrandbits(31),
                ignore_eos=random.random() < 0.5,
            )
        )
    return asks


def stopping(ask: Ask, answer: Answer, random: Random) -> Ask | None:
    """The same request with a stop string that ends its answer somewhere in the middle; None where no text is whole."""
    text = answer.text
    starts = range(len(text) // 3, 2 * len(text) // 3)
    candidates = [text[start : start + STOP_CHARACTERS] for start in starts]
    whole = [stop for stop in candidates if REPLACEMENT not in stop and len(stop) == STOP_CHARACTERS]
    return replace(ask, stop=random.choice(whole)) if whole else None


def cut_at_stop(answer: Answer, stop: str) -> str:
    """What must be left of an answer's text."""
    return answer.text[: answer.text.index(stop)]


def _words(random: Random, num_words: int) -> str:
    return " ".join(random.choices(WORDS, k=num_words))
