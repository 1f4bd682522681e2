"""What the forward pass needs to know of a model, whichever file format it came from."""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, dataclass, fields

from common.errors import ModelError

MAX_LAYERS = 4096  # far above any model: a damaged number must not make us build tables of its size
EXPERT_SIZE_MULTIPLE = 8  # torch's grouped matrix product wants rows of whole 16 bytes


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
class ExpertsConfig:
    """A mixture of experts, each of them a SwiGLU, in place of a layer's MLP."""

    num_experts: int
    num_active: int  # experts that each token goes through
    intermediate_size: int  # of one expert
    is_renormalised: bool  # the probabilities of a token's experts are scaled to add up to 1
    dense_layers: tuple[int, ...] = ()  # layers that have an ordinary MLP all the same


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary GQA attention, SwiGLU. Families differ in what these fields say.

    A field added later gets a default that means "as before": models without it keep their fingerprint.
    """

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
    qk_norm: bool = False  # RMSNorm over each head of q and k, before they are turned
    windows: tuple[int | None, ...] = ()  # per layer, how many tokens a query sees; empty: all of them, everywhere
    experts: ExpertsConfig | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def experts_in(self, layer: int) -> ExpertsConfig | None:
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def describe(self) -> str:
        """Canonical, for the fingerprint: what differs from a default, and whatever has none."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        told = (f.name for f in fields(self) if f.default is MISSING or values[f.name] != f.default)
        return f"ModelConfig({', '.join(f'{name}={values[name]!r}' for name in told)})"


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
    if config.experts is not None:
        _check_experts(config.experts, config.hidden_size, source)


def _check_experts(experts: ExpertsConfig, hidden_size: int, source: str) -> None:
    if experts.num_active > experts.num_experts:
        raise ModelError(f"{source}: {experts.num_active} of {experts.num_experts} experts per token are too many")
    if hidden_size % EXPERT_SIZE_MULTIPLE or experts.intermediate_size % EXPERT_SIZE_MULTIPLE:
        raise ModelError(
            f"{source}: experts of {hidden_size} x {experts.intermediate_size} are not supported: both must be "
            f"multiples of {EXPERT_SIZE_MULTIPLE}"
        )
