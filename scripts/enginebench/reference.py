"""Hugging Face transformers on the same weights, in the same dtype, with as many threads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils import logging as transformers_logging


class Reference:
    """One sequence at a time, without generate(): only the forward pass and an argmax are timed."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        # Dense, as the engine holds them: transformers would go on computing from a GGUF file's packed weights.
        packed = {} if path.is_dir() else {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        folder = path if path.is_dir() else path.parent
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **packed)
        assert all(parameter.dtype == dtype for parameter in model.parameters())
        self._model: Any = model.eval()

    @torch.inference_mode()
    def prefill_s(self, token_ids: list[int]) -> float:
        start = time.perf_counter()
        self._forward(torch.tensor([token_ids]), None)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode_step_s(self, token_ids: list[int], num_warm_up: int, num_steps: int) -> float:
        """The mean of `num_steps` steps that follow the prompt and the warm-up."""
        token, cache = self._forward(torch.tensor([token_ids]), None)
        start = 0.0
        for step in range(num_warm_up + num_steps):
            if step == num_warm_up:
                start = time.perf_counter()
            token, cache = self._forward(token, cache)
        return (time.perf_counter() - start) / num_steps

    def _forward(self, token_ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self._model(input_ids=token_ids, cache=cache, use_cache=True, logits_to_keep=1)
        token: Tensor = out.logits[:, -1:].argmax(dim=-1)
        token.tolist()  # as an engine must, to know the token
        return token, out.cache
