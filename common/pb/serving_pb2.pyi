from common.pb import kv_transfer_pb2 as _kv_transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_COLOCATED: _ClassVar[Role]

class PairStanding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAIR_STANDING_UNSPECIFIED: _ClassVar[PairStanding]
    PAIR_UNCHECKED: _ClassVar[PairStanding]
    PAIR_GOOD: _ClassVar[PairStanding]
    PAIR_REFUSED: _ClassVar[PairStanding]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_HIGH: Priority
PRIORITY_NORMAL: Priority
PRIORITY_LOW: Priority
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_COLOCATED: Role
PAIR_STANDING_UNSPECIFIED: PairStanding
PAIR_UNCHECKED: PairStanding
PAIR_GOOD: PairStanding
PAIR_REFUSED: PairStanding

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "prompt_token_ids", "chat", "sampling", "stop", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    prompt_token_ids: TokenIds
    chat: ChatMessages
    sampling: SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    priority: Priority
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "token_ids", "finish_reason", "usage", "timings", "request_id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    request_id: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("stages", "ttft_s", "tpot_s", "end_to_end_s", "prefill_worker", "decode_worker", "attempts", "placement")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    END_TO_END_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    ttft_s: float
    tpot_s: float
    end_to_end_s: float
    prefill_worker: str
    decode_worker: str
    attempts: int
    placement: str
    def __init__(self, stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., end_to_end_s: _Optional[float] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempts: _Optional[int] = ..., placement: _Optional[str] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, models: _Optional[_Iterable[str]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "ticket", "destination", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    ticket: _kv_transfer_pb2.Ticket
    destination: _kv_transfer_pb2.Destination
    cache_salt: bytes
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., ticket: _Optional[_Union[_kv_transfer_pb2.Ticket, _Mapping]] = ..., destination: _Optional[_Union[_kv_transfer_pb2.Destination, _Mapping]] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "first_token", "done")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    first_token: SampledToken
    done: PrefillDone
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[SampledToken, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("transfer_bytes", "num_pieces", "transfer_s")
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PIECES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    transfer_bytes: int
    num_pieces: int
    transfer_s: float
    def __init__(self, transfer_bytes: _Optional[int] = ..., num_pieces: _Optional[int] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "finish_reason")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    finish_reason: str
    def __init__(self, token_id: _Optional[int] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "transfer_id", "compute_prompt", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    transfer_id: bytes
    compute_prompt: bool
    cache_salt: bytes
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., compute_prompt: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("reserved", "started", "token")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    started: DecodeStarted
    token: SampledToken
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., started: _Optional[_Union[DecodeStarted, _Mapping]] = ..., token: _Optional[_Union[SampledToken, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("destination", "skip_tokens")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    destination: _kv_transfer_pb2.Destination
    skip_tokens: int
    def __init__(self, destination: _Optional[_Union[_kv_transfer_pb2.Destination, _Mapping]] = ..., skip_tokens: _Optional[int] = ...) -> None: ...

class DecodeStarted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class PairCheckRequest(_message.Message):
    __slots__ = ("token_ids", "transfer_id", "source_dtype")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    transfer_id: bytes
    source_dtype: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., transfer_id: _Optional[bytes] = ..., source_dtype: _Optional[str] = ...) -> None: ...

class PairCheckEvent(_message.Message):
    __slots__ = ("reserved", "verdict")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    verdict: PairVerdict
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., verdict: _Optional[_Union[PairVerdict, _Mapping]] = ...) -> None: ...

class PairVerdict(_message.Message):
    __slots__ = ("is_equal", "detail")
    IS_EQUAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    is_equal: bool
    detail: str
    def __init__(self, is_equal: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("hello", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    load: WorkerLoad
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "address", "model", "layout", "vocab_size", "max_model_len", "max_num_seqs", "kv_capacity_tokens", "transport", "block_size", "metrics_address", "wire_dtype")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    incarnation: str
    address: str
    model: str
    layout: _kv_transfer_pb2.KVLayout
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    kv_capacity_tokens: int
    transport: str
    block_size: int
    metrics_address: str
    wire_dtype: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[_kv_transfer_pb2.KVLayout, _Mapping]] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., transport: _Optional[str] = ..., block_size: _Optional[int] = ..., metrics_address: _Optional[str] = ..., wire_dtype: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_reserved", "uncached_tokens", "free_blocks", "total_blocks", "stored_blocks", "evicted_blocks", "links", "prefill_s_per_token", "decode_step_s", "is_draining", "clock_s")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    num_reserved: int
    uncached_tokens: int
    free_blocks: int
    total_blocks: int
    stored_blocks: _containers.RepeatedScalarFieldContainer[bytes]
    evicted_blocks: _containers.RepeatedScalarFieldContainer[bytes]
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    prefill_s_per_token: float
    decode_step_s: float
    is_draining: bool
    clock_s: float
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_reserved: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., stored_blocks: _Optional[_Iterable[bytes]] = ..., evicted_blocks: _Optional[_Iterable[bytes]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., prefill_s_per_token: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., is_draining: _Optional[bool] = ..., clock_s: _Optional[float] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("peer_incarnation", "transport", "bytes_per_s", "round_trip_s", "num_bytes")
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer_incarnation: str
    transport: str
    bytes_per_s: float
    round_trip_s: float
    num_bytes: int
    def __init__(self, peer_incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("router_incarnation", "drain")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    drain: DrainOrder
    def __init__(self, router_incarnation: _Optional[str] = ..., drain: _Optional[_Union[DrainOrder, _Mapping]] = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainWorkerReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SupervisorReport(_message.Message):
    __slots__ = ("pools", "outcome")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    outcome: ScaleOutcome
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., outcome: _Optional[_Union[ScaleOutcome, _Mapping]] = ...) -> None: ...

class ScaleOrder(_message.Message):
    __slots__ = ("order_id", "role", "replicas")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    role: Role
    replicas: int
    def __init__(self, order_id: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleOutcome(_message.Message):
    __slots__ = ("order_id", "error_type", "error")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    error_type: str
    error: str
    def __init__(self, order_id: _Optional[int] = ..., error_type: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("role", "wished", "members", "trouble")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WISHED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    wished: int
    members: _containers.RepeatedCompositeFieldContainer[PoolMember]
    trouble: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., wished: _Optional[int] = ..., members: _Optional[_Iterable[_Union[PoolMember, _Mapping]]] = ..., trouble: _Optional[str] = ...) -> None: ...

class PoolMember(_message.Message):
    __slots__ = ("worker_id", "is_leaving", "obstacle")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    is_leaving: bool
    obstacle: str
    def __init__(self, worker_id: _Optional[str] = ..., is_leaving: _Optional[bool] = ..., obstacle: _Optional[str] = ...) -> None: ...

class ScalePoolRequest(_message.Message):
    __slots__ = ("role", "replicas")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    replicas: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScalePoolReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("hello", "load", "counters", "uptime_s", "links")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    load: WorkerLoad
    counters: _containers.ScalarMap[str, int]
    uptime_s: float
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., counters: _Optional[_Mapping[str, int]] = ..., uptime_s: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ...) -> None: ...

class ClusterStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("model", "is_ready", "reason", "workers", "num_queued", "num_active", "uptime_s", "pairs", "clock_s", "pools")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    model: str
    is_ready: bool
    reason: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerSummary]
    num_queued: int
    num_active: int
    uptime_s: float
    pairs: _containers.RepeatedCompositeFieldContainer[PairSummary]
    clock_s: float
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, model: _Optional[str] = ..., is_ready: _Optional[bool] = ..., reason: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerSummary, _Mapping]]] = ..., num_queued: _Optional[int] = ..., num_active: _Optional[int] = ..., uptime_s: _Optional[float] = ..., pairs: _Optional[_Iterable[_Union[PairSummary, _Mapping]]] = ..., clock_s: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class PairSummary(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "standing", "reason", "link")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    standing: PairStanding
    reason: str
    link: LinkStatus
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., standing: _Optional[_Union[PairStanding, str]] = ..., reason: _Optional[str] = ..., link: _Optional[_Union[LinkStatus, _Mapping]] = ...) -> None: ...

class WorkerSummary(_message.Message):
    __slots__ = ("hello", "load", "num_assigned", "heartbeat_age_s", "num_cached_blocks", "unfit_reason", "clock_skew_s")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNFIT_REASON_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SKEW_S_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    load: WorkerLoad
    num_assigned: int
    heartbeat_age_s: float
    num_cached_blocks: int
    unfit_reason: str
    clock_skew_s: float
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., num_assigned: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., num_cached_blocks: _Optional[int] = ..., unfit_reason: _Optional[str] = ..., clock_skew_s: _Optional[float] = ...) -> None: ...
