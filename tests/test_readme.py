"""The configuration table names every key with the default that the code has."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from common.config import ServeConfig

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", README, re.MULTILINE))


def settings() -> dict[str, object]:
    """Every key of the table's sections with its default; the three pools share their keys."""
    config = ServeConfig()
    return {
        f"{name}.{key}": getattr(section, key)
        for name in ("model", "router", "slo", "prefill", "transfer", "security", "telemetry")
        if isinstance(section := getattr(config, name), BaseModel)
        for key in type(section).model_fields
    }


def test_the_table_has_exactly_the_keys_of_the_config() -> None:
    assert set(ROWS) == set(settings())


@pytest.mark.parametrize(("key", "default"), [(key, value) for key, value in settings().items() if value is not None])
def test_the_table_tells_the_default(key: str, default: object) -> None:
    assert ROWS[key] == f"`{default}`"
