"""A weight's name in a file, given the engine's name for it: tables of patterns, one per file format or family."""

from __future__ import annotations

import re
from collections.abc import Mapping


def translate(name: str, table: Mapping[str, str]) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight; a name that the table lacks stays as it is.

    The table maps stem to stem, {} for each number, first the layer, then the expert; the right side may leave the
    expert out. The ending, .weight or .bias, is kept.
    """
    stem, ending = name.rsplit(".", 1)
    pattern = re.sub(r"\.\d+\b", ".{}", stem)
    return f"{table.get(pattern, pattern).format(*numbers_in(stem))}.{ending}"


def numbers_in(name: str) -> list[int]:
    """The layer, then the expert, where the name has them."""
    return [int(number) for number in re.findall(r"\.(\d+)\b", name)]
