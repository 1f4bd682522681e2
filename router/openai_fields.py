"""OpenAI's fields that are not served here: those that change nothing, and when the others ask for nothing."""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest

# Fields that change nothing about the answer.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        # inside a message
        "name",
        "annotations",
    }
)

# Fields that are not served, and the values at which they ask for nothing. null is always one.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    # inside a message
    "tool_calls": ([],),
    "tool_call_id": (),
    "refusal": ("",),
}


def require_harmless(name: str, value: Any) -> None:
    """Raises: InvalidRequest for a field that is unknown, or would change the answer if it were served."""
    if name in HARMLESS or (name in UNSUPPORTED and _is_neutral(value, UNSUPPORTED[name])):
        return
    is_known = name in UNSUPPORTED
    message = f"{name} is not supported with this value; leave it out" if is_known else f"unknown field {name}"
    raise InvalidRequest(message, param=name)


def describe_others(schema: dict[str, Any]) -> None:
    """Adds the same to an object's JSON schema."""
    harmless: dict[str, Any] = {name: {} for name in sorted(HARMLESS)}
    neutral = {name: {"enum": [None, *values]} for name, values in UNSUPPORTED.items()}
    schema["properties"] = {**harmless, **neutral, **schema.get("properties", {})}
    schema["additionalProperties"] = False


def _is_neutral(value: Any, neutral: tuple[object, ...]) -> bool:
    """Compares types too: 0 asks for log probabilities where False does not."""
    return value is None or any(type(value) is type(item) and value == item for item in neutral)
