"""Clients that ask a deployment again and again, and know what they must be answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

NUM_CLIENTS = 4
NUM_ANSWERS = 8  # of which each of two workers gets some
PROMPTS = [f"{word} and what came of it, told at length and with patience." * 3 for word in ("Rain", "Iron", "Salt")]


@dataclass
class Load:
    """Clients that ask again and again, and what they were answered."""

    url: str
    max_tokens: int
    expected: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    is_over: bool = False

    async def ask(self, http: httpx.AsyncClient, prompt: str) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        response = await http.post(f"{self.url}/v1/completions", json=body)
        return response.json()["choices"][0]["text"] if response.status_code == 200 else response.text

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while not self.is_over:
                prompt = PROMPTS[(number + self.num_answers) % len(PROMPTS)]
                answer = await self.ask(http, prompt)
                self.num_answers += 1
                if answer != self.expected[prompt]:
                    self.wrong.append(answer)


@asynccontextmanager
async def load_on(url: str, num_clients: int = NUM_CLIENTS, max_tokens: int = 48) -> AsyncIterator[Load]:
    load = Load(url, max_tokens)
    async with httpx.AsyncClient(timeout=60) as http:
        load.expected = {prompt: await load.ask(http, prompt) for prompt in PROMPTS}
    assert len(set(load.expected.values())) == len(PROMPTS)
    clients = [asyncio.create_task(load.client(number)) for number in range(num_clients)]
    try:
        yield load
    finally:
        load.is_over = True
        async with asyncio.timeout(60):
            await asyncio.gather(*clients)


async def more_answers(load: Load, num_answers: int = NUM_ANSWERS) -> None:
    enough = load.num_answers + num_answers
    async with asyncio.timeout(60):
        while load.num_answers < enough:
            await asyncio.sleep(0.05)
