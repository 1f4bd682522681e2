"""What the forward pass needs to know of a model, whichever file format it came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from common.errors import ModelError


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. At most one of the three scalings is set."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None
    frequency_divisors: tuple[float, ...] = ()  # one per frequency; how GGUF files store Llama-3 scaling

    def describe(self) -> str:
        """Canonical: two workers may exchange K only if this string is the same on both."""
        parts = [f"theta={self.theta:g}"]
        if self.linear_factor != 1.0:
            parts.append(f"linear={self.linear_factor:g}")
        if self.llama3 is not None:
            scaling = self.llama3
            parts.append(
                f"llama3={scaling.factor:g},{scaling.low_freq_factor:g},{scaling.high_freq_factor:g},"
                f"{scaling.original_max_position_embeddings}"
            )
        if self.frequency_divisors:
            digest = hashlib.sha256(repr(self.frequency_divisors).encode()).hexdigest()
            parts.append(f"divisors={digest[:16]}")
        return " ".join(parts)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family: RMSNorm, rotary GQA attention, SwiGLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    attention_output_bias: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


def check_config(config: ModelConfig, source: str) -> None:
    """Raises: ModelError when the numbers do not fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{source}: head_dim is {config.head_dim}; rotary embedding needs an even one")
    divisors = config.rope.frequency_divisors
    if divisors and len(divisors) != config.head_dim // 2:
        raise ModelError(f"{source}: {len(divisors)} rotary divisors for {config.head_dim // 2} frequencies")
