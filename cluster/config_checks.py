"""What `pdserve doctor` finds of a config: its model, secrets and certificates, memory and ports."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.findings import Finding, Grade
from cluster.machine_checks import GIB
from cluster.plan import Plan, with_free_ports
from common.config import Role, ServeConfig
from common.errors import ConfigError
from engine.kv_cache_size import DEFAULT_CPU_BYTES
from engine.model.dtype import resolve_device, resolve_dtype
from engine.model.placements import placements
from engine.model.weights import open_checkpoint
from router.tokenizer import load_tokenizer


def check_config(plan: Plan, model: Path) -> Iterator[Finding]:
    yield _model(plan.config, model)
    yield from _security(plan.config)
    yield from _memory(plan.config, model)


def check_ports(plan: Plan) -> Finding:
    """Not of a deployment that runs: its ports are taken."""
    try:
        router = with_free_ports(plan).config.router
    except ConfigError as error:
        return Finding("ports", Grade.BAD, str(error).partition(", or give ")[0])  # an option of `pdserve up`
    return Finding("ports", Grade.GOOD, f"{router.http_port}, {router.grpc_port} and {router.control_port} are free")


def _model(config: ServeConfig, path: Path) -> Finding:
    try:
        model = open_checkpoint(path).config
        load_tokenizer(path)
    except ConfigError as error:
        return Finding("model", Grade.BAD, str(error))
    context = config.model.max_model_len or model.max_position_embeddings
    text = f"{config.model.served_name}: {model.num_layers} layers, context {context}, {path}"
    return Finding("model", Grade.GOOD, text)


def _security(config: ServeConfig) -> Iterator[Finding]:
    """What `pdserve up` would refuse. The secret that it makes for itself is no lack."""
    try:
        config.security.cluster_access()
        certificate = config.security.certificate()
        if config.security.secret_file is not None:
            config.kv_transfer()
    except ConfigError as error:
        yield Finding("security", Grade.BAD, str(error))
        return
    secret = config.security.secret_file
    if secret is not None and secret.stat().st_mode & 0o077:
        yield Finding("security", Grade.ODD, f"others may read {secret}: chmod 600 {secret}")
    if not config.router.is_private and certificate is None:
        text = f"router.host {config.router.host} is open to others and speaks in the clear: see security.tls"
        yield Finding("security", Grade.ODD, text)
    if not config.router.is_private and config.router.api_keys_file is None:
        text = f"router.host {config.router.host} is open to others and asks for no key: see router.api_keys_file"
        yield Finding("security", Grade.ODD, text)


def _memory(config: ServeConfig, model: Path) -> Iterator[Finding]:
    """Of workers on the CPU: weights and KV cache each."""
    try:
        num_weights = sum(math.prod(placement.shape) for placement in placements(open_checkpoint(model).config))
        needed = sum(_worker_bytes(config, role, num_weights) for role in Role)
    except ConfigError:  # said by others
        return
    if needed == 0:
        return
    available = _available_bytes()
    text = f"{available / GIB:.1f} GiB available, the workers take about {needed / GIB:.1f}"
    if needed > available:
        advice = "fewer workers, a smaller kv_cache_gib, or model.dtype: bfloat16"
        yield Finding("memory", Grade.BAD, f"{text}: {advice}")
    else:
        yield Finding("memory", Grade.GOOD, text)


def _worker_bytes(config: ServeConfig, role: Role, num_weights: int) -> int:
    """Of one pool."""
    pool = config.pool(role)
    device = resolve_device(pool.device)
    if device.type != "cpu" or not pool.replicas:
        return 0
    dtype = resolve_dtype(config.model.dtype, device)
    kv_bytes = DEFAULT_CPU_BYTES if pool.kv_cache_gib is None else int(pool.kv_cache_gib * GIB)
    return pool.replicas * (num_weights * dtype.itemsize + kv_bytes)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
