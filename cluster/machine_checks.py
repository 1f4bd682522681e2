"""What `pdserve doctor` finds of a machine: packages, CPU, GPUs, limits; and of the clocks of a deployment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import resource
from collections.abc import Iterator

import torch
from packaging.requirements import Requirement

from cluster.findings import Finding, Grade
from cluster.plan import available_cores
from common.config import Role, ServeConfig
from common.errors import ConfigError
from common.pb import serving_pb2 as pb
from engine.model.dtype import resolve_device
from engine.native.load import NO_INSTRUCTIONS, NoKernels, require_native

PROJECT = "pdserve"
SHOWN_VERSIONS = ("torch", "ray", "grpcio", "protobuf", "numpy", "tokenizers")
MIN_OPEN_FILES = 4096  # a router with a thousand streams
MAX_SKEW_S, ODD_SKEW_S = 30.0, 5.0  # proofs between members are good for the former (common/proof.py)
GIB = 2**30


def check_machine(config: ServeConfig) -> Iterator[Finding]:
    yield from _packages()
    yield _cpu()
    yield from _gpus()
    yield from _devices(config)
    yield from _open_files()


def check_clocks(status: pb.ClusterStatus, now_s: float) -> list[Finding]:
    """now_s: seconds since the epoch, here, when the status came."""
    skews = {worker.hello.worker_id: worker.clock_skew_s for worker in status.workers if worker.load.clock_s}
    skews["this machine"] = now_s - status.clock_s
    name, skew_s = max(skews.items(), key=lambda item: abs(item[1]))
    found = f"{name} and the router differ by {abs(skew_s):.1f} s"
    if abs(skew_s) > MAX_SKEW_S:
        advice = f"members prove themselves with a time, which may be off by {MAX_SKEW_S:.0f} s: run NTP on every node"
        return [Finding("clocks", Grade.BAD, f"{found}; {advice}")]
    if abs(skew_s) > ODD_SKEW_S:
        return [Finding("clocks", Grade.ODD, f"{found}; run NTP on every node before it is {MAX_SKEW_S:.0f} s")]
    return [Finding("clocks", Grade.GOOD, f"at most {max(abs(skew_s), 0.1):.1f} s apart")]


def _packages() -> Iterator[Finding]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in SHOWN_VERSIONS)
    yield Finding("versions", Grade.GOOD, f"Python {platform.python_version()}, {versions}")
    for line in importlib.metadata.requires(PROJECT) or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("versions", Grade.BAD, f"{wanted} is not installed: run `make install`")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            text = f"{wanted.name} {version} is installed, {PROJECT} is tested with {wanted.specifier}: `make install`"
            yield Finding("versions", Grade.ODD, text)


def _cpu() -> Finding:
    cores = f"{available_cores()} cores"
    try:
        require_native(1)
    except NoKernels as error:
        grade = Grade.GOOD if str(error) == NO_INSTRUCTIONS else Grade.ODD
        return Finding("CPU", grade, f"{cores}; torch computes, without our own kernels: {error}")
    return Finding("CPU", Grade.GOOD, f"{cores}, our own kernels (AVX512-BF16)")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPUs", Grade.GOOD, f"none that torch {torch.__version__} can use: everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        text = f"{properties.name}, {free_bytes / GIB:.0f} of {total_bytes / GIB:.0f} GiB free"
        yield Finding(f"cuda:{index}", Grade.GOOD, f"{text}, compute {properties.major}.{properties.minor}")
    yield _flash_attention()
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    yield Finding("NCCL", Grade.GOOD, nccl)


def _devices(config: ServeConfig) -> Iterator[Finding]:
    for role in Role:
        try:
            if config.pool(role).replicas:
                resolve_device(config.pool(role).device)
        except ConfigError as error:
            yield Finding("GPUs", Grade.BAD, f"{role}.device: {error}")


def _flash_attention() -> Finding:
    if importlib.util.find_spec("flash_attn") is not None:
        return Finding("flash-attn", Grade.GOOD, importlib.metadata.version("flash_attn"))
    return Finding(
        "flash-attn", Grade.ODD, "not installed: torch's own or Triton's attention; pip install 'pdserve[cuda]'"
    )


def _open_files() -> Iterator[Finding]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < MIN_OPEN_FILES:  # negative: no limit
        text = f"a process may open {most}; each stream takes one: raise the hard limit (ulimit -Hn)"
        yield Finding("open files", Grade.ODD, text)
