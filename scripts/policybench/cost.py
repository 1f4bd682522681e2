"""How long workers take: about a model of 8 billion parameters in bfloat16 on one A100, a worker to a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    prefill_s: float = 0.02  # each prompt
    prefill_token_s: float = 1e-4  # each token that is computed: 16 GFLOP at half of 312 TFLOP/s
    # each pair of a computed token and one that it attends to: 32 layers · 4096 · 4 operations, against the above
    attention_pair_s: float = 3e-9
    step_s: float = 0.009  # each decode step: 16 GB of weights at 1.8 TB/s
    step_sequence_s: float = 1e-4  # each sequence in it
    step_token_s: float = 7e-8  # each token of context in it: 128 KiB of KV

    def prefill(self, cached_tokens: int, uncached_tokens: int) -> float:
        """Seconds: base + b · uncached + c · uncached · context, where a new token sees half of the new ones."""
        context = cached_tokens + uncached_tokens / 2
        return self.prefill_s + uncached_tokens * (self.prefill_token_s + self.attention_pair_s * context)

    def step(self, num_sequences: int, context_tokens: int) -> float:
        return self.step_s + num_sequences * self.step_sequence_s + context_tokens * self.step_token_s
