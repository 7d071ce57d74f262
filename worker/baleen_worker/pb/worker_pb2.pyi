from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_UNIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class TokenizerFile(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKENIZER_FILE_UNSPECIFIED: _ClassVar[TokenizerFile]
    TOKENIZER_FILE_TOKENIZER: _ClassVar[TokenizerFile]
    TOKENIZER_FILE_TOKENIZER_CONFIG: _ClassVar[TokenizerFile]
    TOKENIZER_FILE_MODEL_CONFIG: _ClassVar[TokenizerFile]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_HANDED_OVER: _ClassVar[FinishReason]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_UNIMPLEMENTED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_RESOURCE_EXHAUSTED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_PEER_FAILED: _ClassVar[ErrorCode]
ROLE_UNSPECIFIED: Role
ROLE_UNIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
TOKENIZER_FILE_UNSPECIFIED: TokenizerFile
TOKENIZER_FILE_TOKENIZER: TokenizerFile
TOKENIZER_FILE_TOKENIZER_CONFIG: TokenizerFile
TOKENIZER_FILE_MODEL_CONFIG: TokenizerFile
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_HANDED_OVER: FinishReason
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_UNIMPLEMENTED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_RESOURCE_EXHAUSTED: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_PEER_FAILED: ErrorCode

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "boot_epoch", "model_id", "config_digest", "model_type", "role", "topology", "layout_id", "page_size_tokens", "capacity_pages", "context_length_tokens", "vocab_size", "tokenizer_sha256", "transfer_endpoints", "max_running_requests", "worker_version", "dtype", "device", "eos_token_ids", "features")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_PAGES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_epoch: int
    model_id: str
    config_digest: str
    model_type: str
    role: Role
    topology: ParallelTopology
    layout_id: str
    page_size_tokens: int
    capacity_pages: int
    context_length_tokens: int
    vocab_size: int
    tokenizer_sha256: str
    transfer_endpoints: _containers.RepeatedCompositeFieldContainer[TransferEndpoint]
    max_running_requests: int
    worker_version: str
    dtype: str
    device: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., boot_epoch: _Optional[int] = ..., model_id: _Optional[str] = ..., config_digest: _Optional[str] = ..., model_type: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., topology: _Optional[_Union[ParallelTopology, _Mapping]] = ..., layout_id: _Optional[str] = ..., page_size_tokens: _Optional[int] = ..., capacity_pages: _Optional[int] = ..., context_length_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_sha256: _Optional[str] = ..., transfer_endpoints: _Optional[_Iterable[_Union[TransferEndpoint, _Mapping]]] = ..., max_running_requests: _Optional[int] = ..., worker_version: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class ParallelTopology(_message.Message):
    __slots__ = ("tp_size", "dp_size", "ep_size", "pp_size", "cp_size", "num_nodes", "node_rank")
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CP_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    tp_size: int
    dp_size: int
    ep_size: int
    pp_size: int
    cp_size: int
    num_nodes: int
    node_rank: int
    def __init__(self, tp_size: _Optional[int] = ..., dp_size: _Optional[int] = ..., ep_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., cp_size: _Optional[int] = ..., num_nodes: _Optional[int] = ..., node_rank: _Optional[int] = ...) -> None: ...

class TransferEndpoint(_message.Message):
    __slots__ = ("backend", "address", "dp_rank")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    backend: str
    address: str
    dp_rank: int
    def __init__(self, backend: _Optional[str] = ..., address: _Optional[str] = ..., dp_rank: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("file", "data", "last")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    file: TokenizerFile
    data: bytes
    last: bool
    def __init__(self, file: _Optional[_Union[TokenizerFile, str]] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("freed_pages",)
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    freed_pages: int
    def __init__(self, freed_pages: _Optional[int] = ...) -> None: ...

class ProbeTransferRequest(_message.Message):
    __slots__ = ("peer", "peer_boot_epoch")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    peer: TransferEndpoint
    peer_boot_epoch: int
    def __init__(self, peer: _Optional[_Union[TransferEndpoint, _Mapping]] = ..., peer_boot_epoch: _Optional[int] = ...) -> None: ...

class ProbeTransferResponse(_message.Message):
    __slots__ = ("duration_us", "failure")
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    duration_us: int
    failure: str
    def __init__(self, duration_us: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class GatewayFrame(_message.Message):
    __slots__ = ("sequence", "hello", "submits", "aborts", "heartbeat")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hello: Hello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    aborts: _containers.RepeatedCompositeFieldContainer[Abort]
    heartbeat: Heartbeat
    def __init__(self, sequence: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[Abort, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "gateway_id", "gateway_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    gateway_id: str
    gateway_epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., gateway_id: _Optional[str] = ..., gateway_epoch: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sent_unix_us",)
    SENT_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    sent_unix_us: int
    def __init__(self, sent_unix_us: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: int
    def __init__(self, key: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("key", "request_id", "attempt", "prompt_token_ids", "sampling", "dp_rank", "priority", "deadline_ms", "cache_salt", "trace_parent", "sample_group", "disaggregation", "json_schema", "regex", "ebnf", "structural_tag", "starts_in_reasoning", "resumed_token_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_GROUP_FIELD_NUMBER: _ClassVar[int]
    DISAGGREGATION_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    STARTS_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    key: int
    request_id: bytes
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    dp_rank: int
    priority: int
    deadline_ms: int
    cache_salt: str
    trace_parent: str
    sample_group: SampleGroup
    disaggregation: DisaggregationLeg
    json_schema: str
    regex: str
    ebnf: str
    structural_tag: str
    starts_in_reasoning: bool
    resumed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[int] = ..., request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., dp_rank: _Optional[int] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., trace_parent: _Optional[str] = ..., sample_group: _Optional[_Union[SampleGroup, _Mapping]] = ..., disaggregation: _Optional[_Union[DisaggregationLeg, _Mapping]] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., structural_tag: _Optional[str] = ..., starts_in_reasoning: _Optional[bool] = ..., resumed_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SampleGroup(_message.Message):
    __slots__ = ("group_id", "index", "size")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    index: int
    size: int
    def __init__(self, group_id: _Optional[bytes] = ..., index: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class DisaggregationLeg(_message.Message):
    __slots__ = ("role", "peer", "peer_boot_epoch")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    role: Role
    peer: TransferEndpoint
    peer_boot_epoch: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., peer: _Optional[_Union[TransferEndpoint, _Mapping]] = ..., peer_boot_epoch: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "thinking_budget", "logit_processors")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    LOGIT_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    thinking_budget: int
    logit_processors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., thinking_budget: _Optional[int] = ..., logit_processors: _Optional[_Iterable[str]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("sequence", "welcome", "step", "errors", "load", "kv_events", "heartbeat", "draining")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    welcome: Welcome
    step: StepFrame
    errors: _containers.RepeatedCompositeFieldContainer[RequestError]
    load: LoadReport
    kv_events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    heartbeat: Heartbeat
    draining: bool
    def __init__(self, sequence: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[StepFrame, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[RequestError, _Mapping]]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., kv_events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "boot_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "keys", "token_counts", "token_ids", "finish_reasons", "cached_tokens", "logprobs", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    keys: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[FinishReason]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: LogprobColumns
    prompt_logprobs: LogprobColumns
    def __init__(self, step: _Optional[int] = ..., keys: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[_Union[FinishReason, str]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("rows", "counts", "token_ids", "logprobs", "top_counts", "top_token_ids", "top_logprobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("key", "code", "field", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: int
    code: ErrorCode
    field: str
    message: str
    def __init__(self, key: _Optional[int] = ..., code: _Optional[_Union[ErrorCode, str]] = ..., field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "used_pages", "total_pages", "waiting_prompt_tokens", "steps", "generated_tokens", "prompt_tokens", "dp_rank", "cached_pages", "cached_tokens", "preemptions")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    used_pages: int
    total_pages: int
    waiting_prompt_tokens: int
    steps: int
    generated_tokens: int
    prompt_tokens: int
    dp_rank: int
    cached_pages: int
    cached_tokens: int
    preemptions: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., used_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., dp_rank: _Optional[int] = ..., cached_pages: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("event_id", "dp_rank", "stored", "removed", "cleared")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    event_id: int
    dp_rank: int
    stored: KvStored
    removed: KvRemoved
    cleared: KvCleared
    def __init__(self, event_id: _Optional[int] = ..., dp_rank: _Optional[int] = ..., stored: _Optional[_Union[KvStored, _Mapping]] = ..., removed: _Optional[_Union[KvRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCleared, _Mapping]] = ...) -> None: ...

class KvStored(_message.Message):
    __slots__ = ("page_hashes", "page_size_tokens")
    PAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    page_hashes: _containers.RepeatedScalarFieldContainer[int]
    page_size_tokens: int
    def __init__(self, page_hashes: _Optional[_Iterable[int]] = ..., page_size_tokens: _Optional[int] = ...) -> None: ...

class KvRemoved(_message.Message):
    __slots__ = ("page_hashes",)
    PAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    page_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, page_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class KvCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
