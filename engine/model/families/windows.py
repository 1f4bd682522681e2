"""In which layers attention sees only the latest tokens, as different families' files say it."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.fields import Fields

LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


def window_in_all_layers(fields: Fields, config: ModelConfig, key: str = "sliding_window") -> tuple[int | None, ...]:
    """ModelConfig.windows for a file that states one window, or none. Raises: ModelError."""
    return _windows(fields, config, key, [True] * config.num_layers)


def window_in_some_layers(fields: Fields, config: ModelConfig) -> tuple[int | None, ...]:
    """Qwen's way: `layer_types` lists the layers; older files say from which layer on. Raises: ModelError."""
    if not fields.boolean("use_sliding_window", False):
        return ()
    if fields.get("layer_types") is None:
        first = fields.positive_int("max_window_layers", config.num_layers)
        return _windows(fields, config, "sliding_window", (layer >= first for layer in range(config.num_layers)))
    return _windows(fields, config, "sliding_window", _layer_types(fields, config))


def _windows(fields: Fields, config: ModelConfig, key: str, is_sliding: Iterable[bool]) -> tuple[int | None, ...]:
    longest = config.max_position_embeddings
    size = fields.positive_int(key, longest)
    windows = tuple(size if sliding else None for sliding in is_sliding)
    return windows if size < longest and any(windows) else ()


def _layer_types(fields: Fields, config: ModelConfig) -> list[bool]:
    types = fields.get("layer_types")
    is_complete = isinstance(types, list) and len(types) == config.num_layers
    if not is_complete or any(kind not in tuple(LAYER_TYPES) for kind in types):
        raise ModelError(
            f"{fields.source}: layer_types is {types!r}; it must say {' or '.join(LAYER_TYPES)} for each of the "
            f"{config.num_layers} layers"
        )
    return [LAYER_TYPES[kind] for kind in types]
