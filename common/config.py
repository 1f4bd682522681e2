"""serve.yaml: what is served and how. Each part of the system receives its own section, never the whole."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from common.cluster_access import ClusterAccess
from common.config_section import Section
from common.engine_config import EngineConfig
from common.errors import ConfigError
from common.security_config import SecuritySection, is_loopback
from common.tls_files import require_usable_by_both
from common.transfer_config import MIB, ClusterTls, TlsFiles, TransferConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

Port = Annotated[int, Field(ge=0, le=65535)]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # a decode worker that always computes its own prompts


class ModelSection(Section):
    source: str = DEFAULT_MODEL  # the built-in name, a .gguf file, a Hugging Face folder, or a hub id
    name: str | None = None  # what clients call it; default: derived from source
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8"] = "none"  # of the weights, for decode on CPUs; not in the KV layout
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # tokens; default: the model's own context

    @property
    def served_name(self) -> str:
        return self.name or Path(self.source).name.removesuffix(".gguf")


class RouterSection(Section):
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    control_host: str = "127.0.0.1"  # of what administers: the two ports below; beyond loopback it needs a secret
    control_port: Port = 8002  # workers register here
    # /metrics and /dashboard, once `host` is beyond loopback or has several routers; until then the HTTP port has them
    metrics_port: Port = 9002
    # that share the first two ports; each has the other two for itself, counted up from those
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    policy: Literal["kv_aware", "least_loaded", "round_robin"] = "kv_aware"
    # who computes prompts: prefill workers always, decode workers (never), or whoever measurement favours
    disaggregation: Literal["auto", "always", "never"] = "auto"
    max_index_blocks: Annotated[int, Field(ge=1)] = 1_000_000  # of all workers' prefix caches; about 200 bytes each
    max_queued_requests: Annotated[int, Field(ge=1)] = 256
    max_queued_tokens: Annotated[int, Field(ge=1)] = 1_000_000  # of the queue's prompts, less what workers cache
    api_keys_file: Path | None = None  # who may call; none: everybody
    share_prefix_cache: bool = False  # between the names in api_keys_file
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    max_attempts: Annotated[int, Field(ge=1)] = 3
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0  # SIGTERM → the end of answers that still run

    @property
    def is_private(self) -> bool:
        """Whether clients are on this machine alone."""
        return is_loopback(self.host)

    @property
    def has_metrics_port(self) -> bool:
        """Else the HTTP port serves what is on it: to this machine alone, and by this router alone."""
        return not self.is_private or self.processes > 1


class SloSection(Section):
    # A request whose first token is predicted to come later is refused at once. None: none is, unless its own deadline
    # is nearer than that
    ttft_s: Annotated[float, Field(gt=0)] | None = None
    # What running streams are owed while prompts are computed beside them: those are cut to fit
    tpot_s: Annotated[float, Field(gt=0)] = 0.15


class PoolSection(Section):
    replicas: Annotated[int, Field(ge=0)] = 1
    host: str = "127.0.0.1"
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: cuda where there is one
    num_threads: Annotated[int, Field(ge=1)] | None = None  # default: the machine's cores shared among its workers
    attention: Literal["auto", "torch_reference", "cpu", "native", "flash", "triton"] = "auto"
    block_size: Annotated[int, Field(ge=1)] | None = None  # tokens; default: 16 on CPU, 256 on CUDA
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None  # default: 1.0 on CPU, by gpu_memory_fraction on CUDA
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9  # of what is free once the weights are loaded
    # per step, prefill and decode together; default: 256 on a CPU, where it bounds the wait of a cancel, 2048 on CUDA
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1)] = 64  # running at once
    metrics_port: Port = 0  # of each worker, at `host`; 0: any free one, which several workers on one host need
    # SIGTERM or `pdserve drain` → what still runs goes on elsewhere, and the worker is gone
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0


class TransferTlsSection(Section):
    cert: Path  # each worker's own; PEM files
    key: Path
    ca: Path  # the cluster's authority; whoever shows a certificate of it belongs here


class TransferSection(Section):
    transport: Literal["auto", "shm", "tcp", "grpc", "torch_dist", "nixl"] = "auto"
    piece_bytes: Annotated[int, Field(ge=1024)] | None = None  # aim; default: by what the link does
    wire_dtype: Literal["same", "int8", "fp8"] = "same"  # lossy ones halve the bytes, for links slower than memory
    window_mib: Annotated[int, Field(ge=16, le=65536)] = 64  # decode worker's staging memory for each prefill worker
    max_links: Annotated[int, Field(ge=1)] = 64  # prefill workers at one decode worker
    tcp_port: Port = 0  # a decode worker's; 0: any free one, which several workers on one host need
    tcp_connections: Annotated[int, Field(ge=1, le=16)] = 1  # of each link; more where one does not fill the network
    tls: TransferTlsSection | None = None  # for "tcp"
    timeout_s: Annotated[float, Field(gt=0)] = 30.0  # last chunk computed → commit acknowledged; a link without room
    # each pair of workers transfers one short prompt before it is chosen; a pair whose KV is not what the decode worker
    # computes itself is refused
    self_test: bool = True


class TelemetrySection(Section):
    # of a collector for traces, such as http://127.0.0.1:4318; needs pdserve[otel]
    otlp_endpoint: Annotated[str, Field(pattern="^https?://[^/]")] | None = None
    sample_share: Annotated[float, Field(ge=0, le=1)] = 1.0  # of the requests whose client began no trace of its own


class ServeConfig(Section):
    model: ModelSection = ModelSection()
    router: RouterSection = RouterSection()
    slo: SloSection = SloSection()
    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()
    colocated: PoolSection = PoolSection(replicas=0)
    transfer: TransferSection = TransferSection()
    security: SecuritySection = SecuritySection()
    telemetry: TelemetrySection = TelemetrySection()

    def pool(self, role: Role) -> PoolSection:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}[role]

    def with_threads(self, role: Role, num_threads: int) -> ServeConfig:
        """For one worker whose share of the cores is another than its pool's."""
        return self.model_copy(update={str(role): self.pool(role).model_copy(update={"num_threads": num_threads})})

    def cluster_secret(self) -> bytes:
        """Empty when none is configured. Raises: ConfigError when it cannot be read or is too short to be one."""
        return self.security.secret()

    def kv_transfer(self) -> TransferConfig:
        """For one worker. Raises: ConfigError when the secret or a certificate cannot be used, or where others can call
        without a secret."""
        transfer, access = self.transfer, self.security.cluster_access()
        if not access.secret:
            for role in Role:
                _require_loopback(f"{role}.host", self.pool(role).host)
        return TransferConfig(
            transport=transfer.transport,
            piece_bytes=transfer.piece_bytes,
            window_bytes=transfer.window_mib * MIB,
            max_links=transfer.max_links,
            stall_timeout_s=transfer.timeout_s,
            wire_dtype=transfer.wire_dtype,
            tcp_port=transfer.tcp_port,
            tcp_connections=transfer.tcp_connections,
            tls=self._transfer_tls(access.tls),
            cluster_tls=access.tls,
            secret=access.secret,
        )

    def _transfer_tls(self, cluster_tls: ClusterTls | None) -> TlsFiles | None:
        """The cluster's certificates serve for KV too, unless it was told to go another way, or has its own."""
        if (own := self.transfer.tls) is not None:
            files = TlsFiles(own.cert, own.key, own.ca)
            require_usable_by_both(files, None, "transfer.tls")
            return files
        return cluster_tls.files if cluster_tls and self.transfer.transport in ("auto", "tcp") else None

    def control_access(self) -> ClusterAccess:
        """For the router. Raises: ConfigError when the secret cannot be read, or is missing where others can call."""
        access = self.security.cluster_access()
        if not access.secret:
            _require_loopback("router.control_host", self.router.control_host)
        return access

    def engine(self, role: Role, model_path: Path) -> EngineConfig:
        pool = self.pool(role)
        return EngineConfig(
            model_path=model_path,
            dtype=self.model.dtype,
            quantization=self.model.quantization,
            device=pool.device,
            attention=pool.attention,
            num_threads=pool.num_threads,
            block_size=pool.block_size,
            kv_cache_bytes=None if pool.kv_cache_gib is None else int(pool.kv_cache_gib * 2**30),
            gpu_memory_fraction=pool.gpu_memory_fraction,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            max_num_seqs=pool.max_num_seqs,
            tpot_goal_s=self.slo.tpot_s,
            max_model_len=self.model.max_model_len,
        )


def _require_loopback(key: str, host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"{key} is {host}: what other machines can reach needs a secret. Set security.secret_file to a file that "
            "the router and every worker read, for example from `openssl rand -hex 32`"
        )


def _require_unique_keys(node: yaml.Node | None, above: tuple[yaml.Node, ...] = ()) -> None:
    """As YAML wants it. PyYAML takes the last of two, and a whole section may be lost unseen. Raises: YAMLError."""
    if isinstance(node, yaml.MappingNode) and node not in above:  # an alias may name what it is in
        seen: set[str] = set()
        for key, value in node.value:
            _require_unique_keys(value, (*above, node))
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"`{key.value}` is there twice", problem_mark=key.start_mark)
            seen.add(key.value)


def _without_empty_sections(tree: dict[Any, Any]) -> dict[Any, Any]:
    """A section whose keys are all commented out is one without keys."""
    is_empty = {name for name, section in tree.items() if section is None and name in ServeConfig.model_fields}
    return {name: section for name, section in tree.items() if name not in is_empty}


def load_config(path: Path) -> ServeConfig:
    """Raises: ConfigError naming the file, the key and what it may be."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    try:
        _require_unique_keys(yaml.compose(text, yaml.SafeLoader))
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as `model:` and `router:`, not a {type(tree).__name__}")
    try:
        return ServeConfig.model_validate(_without_empty_sections(tree))
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_describe(problem) for problem in error.errors())) from error


def _describe(problem: object) -> str:
    assert isinstance(problem, dict)
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key `{key}`"
    return f"`{key}` is {problem['input']!r}: {problem['msg']}"
