from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_NONE: _ClassVar[DType]
    FLOAT64: _ClassVar[DType]
    FLOAT32: _ClassVar[DType]
    FLOAT16: _ClassVar[DType]
    BFLOAT16: _ClassVar[DType]
    INT64: _ClassVar[DType]
    INT32: _ClassVar[DType]
    INT16: _ClassVar[DType]
    INT8: _ClassVar[DType]
    UINT8: _ClassVar[DType]
    BOOL: _ClassVar[DType]
    COMPLEX64: _ClassVar[DType]
    COMPLEX128: _ClassVar[DType]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RAW: _ClassVar[Encoding]
    AS_BFLOAT16: _ClassVar[Encoding]
    AS_FLOAT16: _ClassVar[Encoding]
    AS_INT8_BLOCKS: _ClassVar[Encoding]

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Code]
    EXPERT_NOT_FOUND: _ClassVar[Code]
    INVALID_CALL: _ClassVar[Code]
    PERMISSION_DENIED: _ClassVar[Code]
    UNAVAILABLE: _ClassVar[Code]
    BUSY: _ClassVar[Code]
    DEADLINE_EXCEEDED: _ClassVar[Code]
    CORRUPT_DATA: _ClassVar[Code]
    EXPERT_FAILED: _ClassVar[Code]
    INPUTS_NEEDED: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]
    GRADIENTS_LOST: _ClassVar[Code]

class UpdateMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_STEP: _ClassVar[UpdateMode]
    ON_BACKWARD: _ClassVar[UpdateMode]
    ON_SAMPLES: _ClassVar[UpdateMode]

class UpdateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ANY_UPDATE: _ClassVar[UpdateKind]
    STEP: _ClassVar[UpdateKind]
    ZERO_GRAD: _ClassVar[UpdateKind]
DTYPE_NONE: DType
FLOAT64: DType
FLOAT32: DType
FLOAT16: DType
BFLOAT16: DType
INT64: DType
INT32: DType
INT16: DType
INT8: DType
UINT8: DType
BOOL: DType
COMPLEX64: DType
COMPLEX128: DType
RAW: Encoding
AS_BFLOAT16: Encoding
AS_FLOAT16: Encoding
AS_INT8_BLOCKS: Encoding
OK: Code
EXPERT_NOT_FOUND: Code
INVALID_CALL: Code
PERMISSION_DENIED: Code
UNAVAILABLE: Code
BUSY: Code
DEADLINE_EXCEEDED: Code
CORRUPT_DATA: Code
EXPERT_FAILED: Code
INPUTS_NEEDED: Code
INTERNAL: Code
GRADIENTS_LOST: Code
ON_STEP: UpdateMode
ON_BACKWARD: UpdateMode
ON_SAMPLES: UpdateMode
ANY_UPDATE: UpdateKind
STEP: UpdateKind
ZERO_GRAD: UpdateKind

class Packet(_message.Message):
    __slots__ = ("contents", "padding", "payload", "checksum")
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    contents: Contents
    padding: bytes
    payload: bytes
    checksum: int
    def __init__(self, contents: _Optional[_Union[Contents, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class Contents(_message.Message):
    __slots__ = ("announcements", "parts", "is_last")
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    announcements: _containers.RepeatedCompositeFieldContainer[Announcement]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    is_last: bool
    def __init__(self, announcements: _Optional[_Iterable[_Union[Announcement, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., is_last: _Optional[bool] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("parcel", "tensors", "forward_call", "backward_call", "call_result", "state_update", "state_entry", "run")
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_CALL_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_CALL_FIELD_NUMBER: _ClassVar[int]
    CALL_RESULT_FIELD_NUMBER: _ClassVar[int]
    STATE_UPDATE_FIELD_NUMBER: _ClassVar[int]
    STATE_ENTRY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    parcel: int
    tensors: _containers.RepeatedScalarFieldContainer[bytes]
    forward_call: ForwardCall
    backward_call: BackwardCall
    call_result: CallResult
    state_update: StateUpdate
    state_entry: StateEntry
    run: Run
    def __init__(self, parcel: _Optional[int] = ..., tensors: _Optional[_Iterable[bytes]] = ..., forward_call: _Optional[_Union[ForwardCall, _Mapping]] = ..., backward_call: _Optional[_Union[BackwardCall, _Mapping]] = ..., call_result: _Optional[_Union[CallResult, _Mapping]] = ..., state_update: _Optional[_Union[StateUpdate, _Mapping]] = ..., state_entry: _Optional[_Union[StateEntry, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("num_rows", "forward_call", "backward_call", "call_result", "experts", "call_ids", "sequences", "queue_s", "compute_s", "random_seeds")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_CALL_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_CALL_FIELD_NUMBER: _ClassVar[int]
    CALL_RESULT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    RANDOM_SEEDS_FIELD_NUMBER: _ClassVar[int]
    num_rows: _containers.RepeatedScalarFieldContainer[int]
    forward_call: ForwardCall
    backward_call: BackwardCall
    call_result: CallResult
    experts: _containers.RepeatedScalarFieldContainer[str]
    call_ids: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    queue_s: _containers.RepeatedScalarFieldContainer[float]
    compute_s: _containers.RepeatedScalarFieldContainer[float]
    random_seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_rows: _Optional[_Iterable[int]] = ..., forward_call: _Optional[_Union[ForwardCall, _Mapping]] = ..., backward_call: _Optional[_Union[BackwardCall, _Mapping]] = ..., call_result: _Optional[_Union[CallResult, _Mapping]] = ..., experts: _Optional[_Iterable[str]] = ..., call_ids: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[int]] = ..., queue_s: _Optional[_Iterable[float]] = ..., compute_s: _Optional[_Iterable[float]] = ..., random_seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("parcel", "tensor", "offset", "num_bytes")
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    parcel: int
    tensor: int
    offset: int
    num_bytes: int
    def __init__(self, parcel: _Optional[int] = ..., tensor: _Optional[int] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("dtype", "shape", "encoding", "num_bytes")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    encoding: Encoding
    num_bytes: int
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ForwardCall(_message.Message):
    __slots__ = ("client_id", "call_id", "expert", "keep_graph", "input_requires_grad", "evaluate", "reply_encoding", "random_seed")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    KEEP_GRAPH_FIELD_NUMBER: _ClassVar[int]
    INPUT_REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    REPLY_ENCODING_FIELD_NUMBER: _ClassVar[int]
    RANDOM_SEED_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    call_id: int
    expert: str
    keep_graph: bool
    input_requires_grad: _containers.RepeatedScalarFieldContainer[bool]
    evaluate: bool
    reply_encoding: Encoding
    random_seed: int
    def __init__(self, client_id: _Optional[bytes] = ..., call_id: _Optional[int] = ..., expert: _Optional[str] = ..., keep_graph: _Optional[bool] = ..., input_requires_grad: _Optional[_Iterable[bool]] = ..., evaluate: _Optional[bool] = ..., reply_encoding: _Optional[_Union[Encoding, str]] = ..., random_seed: _Optional[int] = ...) -> None: ...

class BackwardCall(_message.Message):
    __slots__ = ("client_id", "sequence", "settled_below", "call_id", "expert", "wants_weight_grads", "wants_input_grads", "keep_graph", "num_grad_outputs", "has_inputs", "evaluate", "reply_encoding", "random_seed", "replica")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BELOW_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    WANTS_WEIGHT_GRADS_FIELD_NUMBER: _ClassVar[int]
    WANTS_INPUT_GRADS_FIELD_NUMBER: _ClassVar[int]
    KEEP_GRAPH_FIELD_NUMBER: _ClassVar[int]
    NUM_GRAD_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    HAS_INPUTS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    REPLY_ENCODING_FIELD_NUMBER: _ClassVar[int]
    RANDOM_SEED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    sequence: int
    settled_below: int
    call_id: int
    expert: str
    wants_weight_grads: bool
    wants_input_grads: _containers.RepeatedScalarFieldContainer[bool]
    keep_graph: bool
    num_grad_outputs: int
    has_inputs: bool
    evaluate: bool
    reply_encoding: Encoding
    random_seed: int
    replica: int
    def __init__(self, client_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., settled_below: _Optional[int] = ..., call_id: _Optional[int] = ..., expert: _Optional[str] = ..., wants_weight_grads: _Optional[bool] = ..., wants_input_grads: _Optional[_Iterable[bool]] = ..., keep_graph: _Optional[bool] = ..., num_grad_outputs: _Optional[int] = ..., has_inputs: _Optional[bool] = ..., evaluate: _Optional[bool] = ..., reply_encoding: _Optional[_Union[Encoding, str]] = ..., random_seed: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...

class CallResult(_message.Message):
    __slots__ = ("call", "status", "is_sequence", "queue_s", "compute_s", "has_drawn", "wants_no_step", "server", "uses")
    CALL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    IS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAWN_FIELD_NUMBER: _ClassVar[int]
    WANTS_NO_STEP_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    call: int
    status: Status
    is_sequence: bool
    queue_s: float
    compute_s: float
    has_drawn: bool
    wants_no_step: bool
    server: int
    uses: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, call: _Optional[int] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., is_sequence: _Optional[bool] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., has_drawn: _Optional[bool] = ..., wants_no_step: _Optional[bool] = ..., server: _Optional[int] = ..., uses: _Optional[_Iterable[int]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("checksum",)
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    def __init__(self, checksum: _Optional[int] = ...) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("server_version", "server_id", "experts", "limits", "layouts", "up_for_s", "checksum")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    UP_FOR_S_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    server_id: str
    experts: _containers.RepeatedCompositeFieldContainer[ExpertInfo]
    limits: ServerLimits
    layouts: _containers.RepeatedCompositeFieldContainer[StateLayout]
    up_for_s: float
    checksum: int
    def __init__(self, server_version: _Optional[str] = ..., server_id: _Optional[str] = ..., experts: _Optional[_Iterable[_Union[ExpertInfo, _Mapping]]] = ..., limits: _Optional[_Union[ServerLimits, _Mapping]] = ..., layouts: _Optional[_Iterable[_Union[StateLayout, _Mapping]]] = ..., up_for_s: _Optional[float] = ..., checksum: _Optional[int] = ...) -> None: ...

class ExpertInfo(_message.Message):
    __slots__ = ("name", "kind", "inputs", "outputs", "num_parameters", "is_trained", "update", "num_updates", "optimizer", "wants_hints", "layout", "replica", "may_draw")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    WANTS_HINTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MAY_DRAW_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    inputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    outputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    num_parameters: int
    is_trained: bool
    update: UpdateMode
    num_updates: int
    optimizer: str
    wants_hints: bool
    layout: int
    replica: int
    may_draw: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., num_parameters: _Optional[int] = ..., is_trained: _Optional[bool] = ..., update: _Optional[_Union[UpdateMode, str]] = ..., num_updates: _Optional[int] = ..., optimizer: _Optional[str] = ..., wants_hints: _Optional[bool] = ..., layout: _Optional[int] = ..., replica: _Optional[int] = ..., may_draw: _Optional[bool] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("dtype", "shape", "may_have_more")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    MAY_HAVE_MORE_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    may_have_more: bool
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., may_have_more: _Optional[bool] = ...) -> None: ...

class ServerLimits(_message.Message):
    __slots__ = ("max_tensor_bytes", "max_message_bytes")
    MAX_TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_tensor_bytes: int
    max_message_bytes: int
    def __init__(self, max_tensor_bytes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("client_id", "sequence", "settled_below", "experts", "kind", "gathered", "checksum")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BELOW_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    sequence: int
    settled_below: int
    experts: _containers.RepeatedScalarFieldContainer[str]
    kind: UpdateKind
    gathered: _containers.RepeatedCompositeFieldContainer[GatheredBackwards]
    checksum: int
    def __init__(self, client_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., settled_below: _Optional[int] = ..., experts: _Optional[_Iterable[str]] = ..., kind: _Optional[_Union[UpdateKind, str]] = ..., gathered: _Optional[_Iterable[_Union[GatheredBackwards, _Mapping]]] = ..., checksum: _Optional[int] = ...) -> None: ...

class GatheredBackwards(_message.Message):
    __slots__ = ("at_least", "at_most", "digest", "unsure")
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    AT_MOST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNSURE_FIELD_NUMBER: _ClassVar[int]
    at_least: int
    at_most: int
    digest: int
    unsure: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, at_least: _Optional[int] = ..., at_most: _Optional[int] = ..., digest: _Optional[int] = ..., unsure: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateReply(_message.Message):
    __slots__ = ("updates", "checksum")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[ExpertUpdate]
    checksum: int
    def __init__(self, updates: _Optional[_Iterable[_Union[ExpertUpdate, _Mapping]]] = ..., checksum: _Optional[int] = ...) -> None: ...

class ExpertUpdate(_message.Message):
    __slots__ = ("expert", "status", "num_updates")
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    expert: str
    status: Status
    num_updates: int
    def __init__(self, expert: _Optional[str] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., num_updates: _Optional[int] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("client_id", "sequence", "settled_below", "checksum")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BELOW_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    sequence: int
    settled_below: int
    checksum: int
    def __init__(self, client_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., settled_below: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("generation", "checksum")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    generation: str
    checksum: int
    def __init__(self, generation: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class ExpectRequest(_message.Message):
    __slots__ = ("experts", "checksum")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[str]
    checksum: int
    def __init__(self, experts: _Optional[_Iterable[str]] = ..., checksum: _Optional[int] = ...) -> None: ...

class ExpectReply(_message.Message):
    __slots__ = ("checksum",)
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    def __init__(self, checksum: _Optional[int] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("client_id", "experts", "call_ids", "checksum")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    experts: _containers.RepeatedScalarFieldContainer[str]
    call_ids: _containers.RepeatedScalarFieldContainer[int]
    checksum: int
    def __init__(self, client_id: _Optional[bytes] = ..., experts: _Optional[_Iterable[str]] = ..., call_ids: _Optional[_Iterable[int]] = ..., checksum: _Optional[int] = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ("checksum",)
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    def __init__(self, checksum: _Optional[int] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("experts", "checksum")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[str]
    checksum: int
    def __init__(self, experts: _Optional[_Iterable[str]] = ..., checksum: _Optional[int] = ...) -> None: ...

class StateLayout(_message.Message):
    __slots__ = ("entries", "left_out")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[EntryLayout]
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entries: _Optional[_Iterable[_Union[EntryLayout, _Mapping]]] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class EntryLayout(_message.Message):
    __slots__ = ("key", "dtype", "shape")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    key: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class StateEntry(_message.Message):
    __slots__ = ("expert", "key", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    expert: str
    key: str
    versions: _containers.ScalarMap[str, int]
    def __init__(self, expert: _Optional[str] = ..., key: _Optional[str] = ..., versions: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StateUpdate(_message.Message):
    __slots__ = ("client_id", "sequence", "settled_below", "num_entries")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BELOW_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    sequence: int
    settled_below: int
    num_entries: int
    def __init__(self, client_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., settled_below: _Optional[int] = ..., num_entries: _Optional[int] = ...) -> None: ...
