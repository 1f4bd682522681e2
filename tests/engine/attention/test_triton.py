"""Our Triton kernels against the reference, on a GPU where there is one and through Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import triton_paged
from engine.attention.base import AttentionMetadata
from engine.attention.triton_paged import TritonAttention, num_splits
from tests.engine.attention.test_backends import Case, assert_same_as_reference, cases, metadata_for, tensors_for

ROOT = Path(__file__).parents[3]
DEVICE = torch.device("cpu" if triton_paged.IS_INTERPRETED else "cuda")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@given(case=cases())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_triton_attention_equals_the_reference_on_any_batch(case: Case) -> None:
    assert_same_as_reference(TritonAttention(DEVICE), case, DEVICE)


@pytest.mark.parametrize("block_size", [1, 16, 17, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_attention_takes_any_block_size(block_size: int, dtype: torch.dtype) -> None:
    case = Case([(1, 1), (1, 300), (2, 2), (70, 90)], block_size, 2, 4, 16, dtype, 9)
    assert_same_as_reference(TritonAttention(DEVICE), case, DEVICE)


@pytest.mark.parametrize("head_dim", [24, 80, 128])
def test_triton_attention_takes_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    assert_same_as_reference(
        TritonAttention(DEVICE), Case([(1, 40), (9, 50)], 8, 1, 3, head_dim, torch.float32, 2), DEVICE
    )


@pytest.mark.parametrize("seq_lens", [[700], [129, 1, 513], [128 * 16]])
def test_a_decode_step_split_over_many_programs_equals_the_reference(seq_lens: list[int]) -> None:
    assert num_splits(len(seq_lens), max(seq_lens), triton_paged.INTERPRETED_PROCESSORS) > 1
    case = Case([(1, length) for length in seq_lens], 32, 1, 4, 16, torch.float32, 1)
    assert_same_as_reference(TritonAttention(DEVICE), case, DEVICE)


@given(case=cases(), window=st.integers(1, 200))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_window_hides_what_lies_further_back(case: Case, window: int) -> None:
    case = replace(case, dtype=torch.float32)
    metadata = metadata_for(case, DEVICE)
    tensors = [tensor.to(DEVICE) for tensor in tensors_for(case, metadata_for(case))]
    actual = TritonAttention(DEVICE)(*tensors, metadata, 0.3, window)
    torch.testing.assert_close(actual, windowed(*tensors, metadata, window), atol=1e-5, rtol=1e-5)


def windowed(query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, window: int) -> Tensor:
    """Token by token: the keys it may see, and nothing else."""
    group = query.shape[1] // key_cache.shape[2]
    rows: list[Tensor] = []
    for i, (query_len, seq_len) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
        table = metadata.block_table[i].long()
        keys = key_cache[table].flatten(0, 1).repeat_interleave(group, dim=1)
        values = value_cache[table].flatten(0, 1).repeat_interleave(group, dim=1)
        for position in range(seq_len - query_len, seq_len):
            seen = slice(max(0, position - window + 1), position + 1)
            weights = (torch.einsum("hd,khd->hk", query[len(rows)], keys[seen]) * 0.3).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, values[seen]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("num_programs", "num_keys", "expected"),
    [(1, 100, 1), (1, 300, 2), (8, 100_000, 32), (64, 4096, 4), (1000, 4096, 1), (131, 100_000, 2)],
)
def test_keys_are_split_while_that_keeps_the_device_busier(num_programs: int, num_keys: int, expected: int) -> None:
    assert num_splits(num_programs, num_keys, num_processors=132) == expected


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """With less shared memory than a block may have there (KiB, by compute capability: CUDA C++ Programming Guide)."""
    limits = {"89": 99, "90": 227}
    cases = ["89:float32:128:0", "89:float16:256:0", "90:bfloat16:128:4096"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("compile_triton.py")), *cases]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    compiled = [line.split() for line in result.stdout.splitlines()]
    assert [name for _, name, _ in compiled] == ["attend_tile", "attend_tile", "combine_splits"] * len(cases)
    assert all(int(shared) <= limits[architecture] * 1024 for architecture, _, shared in compiled)
