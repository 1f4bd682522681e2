"""The page: three files of this folder made into one that needs nothing else, and the policy that holds it to that."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Page:
    html: bytes
    headers: dict[str, str]


@cache
def dashboard_page() -> Page:
    style, script = _text("page.css"), _text("page.js")
    html = _text("page.html").replace("/*STYLE*/", style, 1).replace("/*SCRIPT*/", script, 1)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html.encode(), headers)


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """Of what stands between the tags, to the byte."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode('ascii')}'"
