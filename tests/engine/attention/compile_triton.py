"""Compiles what TritonAttention would launch, for GPUs that need not be here. A process of its own: Triton must not be
interpreting. Prints a line for each kernel: architecture, name, bytes of shared memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from engine.attention import triton_paged
from engine.attention.base import AttentionMetadata
from engine.attention.triton_kernels import attend_tile, combine_splits

OPTIONS = ("num_warps", "num_stages")
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}


@dataclass
class Launches:
    """Stands where a kernel stands and keeps how it is launched."""

    kernel: Any
    seen: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self.seen.append(dict(zip(self.kernel.arg_names, args, strict=False)) | named)

        return launch

    def compile_for(self, architecture: int) -> None:
        for launched in self.seen:
            options = {name: launched[name] for name in OPTIONS if name in launched}
            arguments = {name: value for name, value in launched.items() if name not in OPTIONS}
            signature = {name: self._type_of(name, value) for name, value in arguments.items()}
            constants = {name: arguments[name] for name, kind in signature.items() if kind == "constexpr"}
            source = ASTSource(self.kernel, signature, constants)
            compiled = compile_kernel(source, target=GPUTarget("cuda", architecture, 32), options=options)
            print(architecture, self.kernel.__name__, compiled.metadata.shared)

    def _type_of(self, name: str, value: object) -> str:
        if name.isupper():
            return "constexpr"
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"


def main(cases: list[str]) -> None:
    """Each case (architecture:dtype:head_dim:window): a step of one long decode and one prefill chunk."""
    for case in cases:
        architecture, dtype, head_dim, window = case.split(":")
        attend, combine = Launches(attend_tile), Launches(combine_splits)
        triton_paged.attend_tile, triton_paged.combine_splits = attend, combine
        _launch(getattr(torch, dtype), int(head_dim), int(window) or None)
        for launches in (attend, combine):
            launches.compile_for(int(architecture))


def _launch(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    query = torch.empty(1 + 300, 32, head_dim, dtype=dtype, device="meta")
    cache = torch.empty(64, 256, 8, head_dim, dtype=dtype, device="meta")
    numbers = torch.empty(3, dtype=torch.int32, device="meta")
    table = torch.empty(2, 32, dtype=torch.int32, device="meta")
    metadata = AttentionMetadata(numbers, numbers[:2], table, [1, 300], [8000, 300], 1, 300, 8000)
    attention = triton_paged.TritonAttention(torch.device("cuda"))  # only a name: nothing is launched
    attention._num_processors = 132
    attention(query, cache, cache, metadata, 0.1, window)


if __name__ == "__main__":
    main(sys.argv[1:])
