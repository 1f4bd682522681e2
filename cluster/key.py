"""`pdserve key NAME`: a new API key. The line for the file goes to stdout, so that it can be appended with >>."""

from __future__ import annotations

import sys

from router.api_keys import new_key
from router.tenant import RateLimits


def make_key(name: str, limits: RateLimits) -> int:
    """Raises: ConfigError for a name that cannot be one."""
    made = new_key(name, limits)
    print(f"the key of {name}, which is shown this once:\n\n    {made.key}\n", file=sys.stderr)
    print(made.line)
    if sys.stdout.isatty():
        print("\nthe line above belongs into router.api_keys_file", file=sys.stderr)
    return 0
