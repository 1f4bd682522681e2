from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVLayout(_message.Message):
    __slots__ = ("model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "dtype", "rope")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    rope: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., rope: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("transfer_id", "attempt", "source_incarnation", "destination_incarnation", "num_tokens", "skip_tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    attempt: int
    source_incarnation: str
    destination_incarnation: str
    num_tokens: int
    skip_tokens: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., source_incarnation: _Optional[str] = ..., destination_incarnation: _Optional[str] = ..., num_tokens: _Optional[int] = ..., skip_tokens: _Optional[int] = ...) -> None: ...

class Destination(_message.Message):
    __slots__ = ("address", "incarnation", "transport", "offers", "protocol_version")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    transport: str
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    protocol_version: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "address")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("hello", "piece", "commit", "abort", "proof", "join")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    piece: Piece
    commit: Commit
    abort: AbortTransfer
    proof: LinkProof
    join: LinkJoin
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[AbortTransfer, _Mapping]] = ..., proof: _Optional[_Union[LinkProof, _Mapping]] = ..., join: _Optional[_Union[LinkJoin, _Mapping]] = ...) -> None: ...

class LinkReply(_message.Message):
    __slots__ = ("welcome", "commit_result", "ended", "challenge", "credit", "refusal")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    COMMIT_RESULT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    welcome: LinkWelcome
    commit_result: CommitResult
    ended: TransferEnded
    challenge: LinkChallenge
    credit: LinkCredit
    refusal: LinkRefusal
    def __init__(self, welcome: _Optional[_Union[LinkWelcome, _Mapping]] = ..., commit_result: _Optional[_Union[CommitResult, _Mapping]] = ..., ended: _Optional[_Union[TransferEnded, _Mapping]] = ..., challenge: _Optional[_Union[LinkChallenge, _Mapping]] = ..., credit: _Optional[_Union[LinkCredit, _Mapping]] = ..., refusal: _Optional[_Union[LinkRefusal, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("protocol_version", "source_incarnation", "destination_incarnation", "layout", "transport", "checksum", "nonce", "head_start", "head_end", "wire_dtype")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    source_incarnation: str
    destination_incarnation: str
    layout: KVLayout
    transport: str
    checksum: str
    nonce: bytes
    head_start: int
    head_end: int
    wire_dtype: str
    def __init__(self, protocol_version: _Optional[int] = ..., source_incarnation: _Optional[str] = ..., destination_incarnation: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., transport: _Optional[str] = ..., checksum: _Optional[str] = ..., nonce: _Optional[bytes] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., wire_dtype: _Optional[str] = ...) -> None: ...

class LinkChallenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class LinkProof(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class LinkWelcome(_message.Message):
    __slots__ = ("protocol_version", "layout", "proof", "credit_bytes", "head_start", "head_end", "data_token", "num_connections", "nixl_metadata", "pair", "source_token", "destination_token")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    DATA_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    layout: KVLayout
    proof: bytes
    credit_bytes: int
    head_start: int
    head_end: int
    data_token: bytes
    num_connections: int
    nixl_metadata: bytes
    pair: PairEntry
    source_token: bytes
    destination_token: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., proof: _Optional[bytes] = ..., credit_bytes: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., data_token: _Optional[bytes] = ..., num_connections: _Optional[int] = ..., nixl_metadata: _Optional[bytes] = ..., pair: _Optional[_Union[PairEntry, _Mapping]] = ..., source_token: _Optional[bytes] = ..., destination_token: _Optional[bytes] = ...) -> None: ...

class PairEntry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class LinkJoin(_message.Message):
    __slots__ = ("pair",)
    PAIR_FIELD_NUMBER: _ClassVar[int]
    pair: PairEntry
    def __init__(self, pair: _Optional[_Union[PairEntry, _Mapping]] = ...) -> None: ...

class LinkCredit(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class LinkRefusal(_message.Message):
    __slots__ = ("error_type", "error")
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error_type: str
    error: str
    def __init__(self, error_type: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("ticket", "layer_start", "layer_end", "token_start", "token_end", "checksum", "num_bytes", "payload", "offset")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    checksum: int
    num_bytes: int
    payload: bytes
    offset: int
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., checksum: _Optional[int] = ..., num_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("ticket", "num_pieces", "num_bytes", "checksum", "first_token")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_PIECES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    num_pieces: int
    num_bytes: int
    checksum: int
    first_token: int
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., num_pieces: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., first_token: _Optional[int] = ...) -> None: ...

class CommitResult(_message.Message):
    __slots__ = ("ticket", "is_accepted", "error_type", "error")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    IS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    is_accepted: bool
    error_type: str
    error: str
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., is_accepted: _Optional[bool] = ..., error_type: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class AbortTransfer(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class TransferEnded(_message.Message):
    __slots__ = ("ticket", "reason")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    reason: str
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...
