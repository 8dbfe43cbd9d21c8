"""The Open Inference Protocol (KServe v2, `inference.GRPCInferenceService`): forward passes for existing clients.

An expert is a model whose inputs are called `input.0`, `input.1`, ... and whose outputs are `output.0`, ... Tensors
travel as raw contents, which is what `tritonclient.grpc` sends. Nothing is kept for a backward, and nothing trains.

The messages are described here and not generated: they live in a descriptor pool of their own, because generated
code would register the package `inference` for the whole process, where it clashes with tritonclient's. Only the
fields that are used are described; protobuf skips the others.

Source: https://github.com/kserve/open-inference-protocol (specification/protocol/open_inference_grpc.proto).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import grpc
import torch
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from torch import Tensor, nn

from experts_server.hosting.calls import ForwardCall, num_rows
from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.modules import IdentityExpert, TransformerExpert
from experts_server.queues.registry import Registry, only_result
from experts_server.serving.doorway import Context, Doorway, Passing, only_message
from moe_autograd.errors import ExpertNotFoundError, InvalidCallError
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.wire.framing import parse
from moe_autograd.wire.tensors import bytes_if_filled, plain, raw_bytes

SERVICE = "inference.GRPCInferenceService"
DATATYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
KEEPS_SHAPE = (FeedForwardExpert, SwiGLUExpert, TransformerExpert, IdentityExpert)
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
MAX_DIMENSIONS = 16
VERSION = "1"  # of each model; there is one

Answer = Callable[[Any, Passing], Awaitable[Any]]  # to a request

# message -> field -> (number, type); "*" marks a repeated field
_TENSOR = {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "int64*")}
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "string*")},
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "Tensor": _TENSOR,
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "string*"),
        "platform": (3, "string"),
        "inputs": (4, "Tensor*"),
        "outputs": (5, "Tensor*"),
    },
    "RequestedOutput": {"name": (1, "string")},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "inputs": (5, "Tensor*"),
        "outputs": (6, "RequestedOutput*"),
        "raw_input_contents": (7, "bytes*"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "outputs": (5, "Tensor*"),
        "raw_output_contents": (6, "bytes*"),
    },
}
RPCS = tuple(name.removesuffix("Request") for name in _MESSAGES if name.endswith("Request"))


def _described() -> DescriptorPool:
    """Return the messages and the service, in a pool of their own."""
    field_types = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "string": field_types.TYPE_STRING,
        "bytes": field_types.TYPE_BYTES,
        "bool": field_types.TYPE_BOOL,
        "int64": field_types.TYPE_INT64,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="open_inference.proto", package="inference", syntax="proto3"
    )
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            scalar = scalars.get(kind.rstrip("*"))
            field = message.field.add(name=field_name, number=number)
            field.label = field_types.LABEL_REPEATED if kind.endswith("*") else field_types.LABEL_OPTIONAL
            field.type = field_types.TYPE_MESSAGE if scalar is None else scalar
            if scalar is None:
                field.type_name = f".inference.{kind.rstrip('*')}"
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for rpc in RPCS:
        service.method.add(
            name=rpc, input_type=f".inference.{rpc}Request", output_type=f".inference.{rpc}Response"
        )
    pool = DescriptorPool()
    pool.Add(file)
    return pool


POOL = _described()
MESSAGES: dict[str, Any] = {
    name: message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))
    for name in _MESSAGES
}


class OpenInference:
    """The handlers of the protocol.

    Args:
        registry: what is hosted; an expert's name is the model's.
        doorway: the server's; everything here needs "read".
        is_ready: whether the server is.
        max_tensor_bytes: of one input.

    Threads: the event loop's.
    """

    def __init__(
        self, registry: Registry, doorway: Doorway, is_ready: Callable[[], bool], max_tensor_bytes: int
    ) -> None:
        self._registry = registry
        self._doorway = doorway
        self._is_ready = is_ready
        self._max_tensor_bytes = max_tensor_bytes
        self._server_version = metadata.version("moe-autograd")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the handlers."""
        answers: dict[str, Answer] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(self._guarded(MESSAGES[f"{name}Request"], answer))
            for name, answer in answers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _guarded(self, request_class: Any, answer: Answer) -> Callable[[Any, Context], Awaitable[bytes]]:
        async def handle(_: Any, context: Context) -> bytes:
            async with self._doorway.passing(context, "read") as rpc:
                request = parse(request_class, await only_message(rpc))
                return bytes((await answer(request, rpc)).SerializeToString())

        return handle

    async def _server_live(self, _: Any, __: Passing) -> Any:
        return _make("ServerLiveResponse", live=True)

    async def _server_ready(self, _: Any, __: Passing) -> Any:
        return _make("ServerReadyResponse", ready=self._is_ready())

    async def _model_ready(self, request: Any, _: Passing) -> Any:
        is_there = request.name in self._registry and request.version in ("", VERSION)
        return _make("ModelReadyResponse", ready=self._is_ready() and is_there)

    async def _server_metadata(self, _: Any, __: Passing) -> Any:
        return _make("ServerMetadataResponse", name="experts-server", version=self._server_version)

    async def _model_metadata(self, request: Any, _: Passing) -> Any:
        hosted = self._registry[request.name].hosted
        _check_version(request.name, request.version)
        reply = _make("ModelMetadataResponse", name=request.name, versions=[VERSION], platform="pytorch")
        reply.inputs.add(name="input.0", datatype=_datatype_of(hosted), shape=_input_shape_of(hosted))
        reply.outputs.add(name="output.0", datatype=_datatype_of(hosted), shape=_output_shape_of(hosted))
        return reply

    async def _infer(self, request: Any, rpc: Passing) -> Any:
        inputs = self._inputs_of(request)
        remaining_s = rpc.time_remaining()

        def call(reply: Any) -> ForwardCall:
            return ForwardCall(
                rpc.peer().encode(),  # turns go round between connections
                reply,
                0,
                inputs,
                evaluate=True,
                may_train=rpc.may_train,
                deadline=None if remaining_s is None else time.monotonic() + remaining_s,
                num_tokens=num_rows(inputs[0]),
                num_bytes=sum(x.nbytes for x in inputs),
            )

        outputs = only_result(await self._registry.ask([request.model_name], call))
        return _response(request, outputs.tensors)

    def _inputs_of(self, request: Any) -> tuple[Tensor, ...]:
        self._registry[request.model_name]
        _check_version(request.model_name, request.model_version)
        num_inputs, num_raw = len(request.inputs), len(request.raw_input_contents)
        if num_inputs == 0 or num_inputs != num_raw:
            raise InvalidCallError(
                f"model {request.model_name!r}: expected one raw_input_contents for each input, and an input, got "
                f"{num_raw} for {num_inputs}. Send raw contents, as tritonclient does with set_data_from_numpy."
            )
        given = {
            header.name: (header, raw)
            for header, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        expected = [f"input.{index}" for index in range(num_inputs)]
        if given.keys() != set(expected):
            raise InvalidCallError(
                f"model {request.model_name!r}: expected {num_inputs} inputs called {', '.join(expected)}, got "
                f"{', '.join(header.name for header in request.inputs)}."
            )
        return tuple(self._input_of(*given[name]) for name in expected)  # whatever order they came in

    def _input_of(self, header: Any, raw: bytes) -> Tensor:
        dtype, shape = DATATYPES.get(header.datatype), tuple(header.shape)
        if dtype is None:
            raise InvalidCallError(
                f"input {header.name!r}: expected a datatype of {', '.join(DATATYPES)}, got {header.datatype!r}."
            )
        if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise InvalidCallError(
                f"input {header.name!r}: expected up to {MAX_DIMENSIONS} sizes, got {shape}."
            )
        if bytes_if_filled(shape, dtype) > self._max_tensor_bytes:
            raise InvalidCallError(
                f"input {header.name!r}: expected at most {self._max_tensor_bytes} bytes, got {shape} of "
                f"{header.datatype}. Send fewer rows at once."
            )
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes != len(raw):
            raise InvalidCallError(
                f"input {header.name!r}: expected {num_bytes} bytes for {shape} of {header.datatype}, got {len(raw)}."
            )
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if dtype == torch.bool and max(raw) > 1:
            raise InvalidCallError(f"input {header.name!r}: expected bools of 0 and 1, got another byte.")
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _check_version(model: str, version: str) -> None:
    if version not in ("", VERSION):
        raise ExpertNotFoundError(f"model {model!r}: expected version {VERSION!r} or none, got {version!r}.")


def _response(request: Any, outputs: tuple[Tensor, ...]) -> Any:
    """Return the outputs that are asked for, in that order; all of them if none is."""
    reply = _make("ModelInferResponse", model_name=request.model_name, model_version=VERSION, id=request.id)
    by_name = {f"output.{index}": output for index, output in enumerate(outputs)}
    wanted = [each.name for each in request.outputs] or list(by_name)
    if len(wanted) > len(by_name):
        raise InvalidCallError(
            f"model {request.model_name!r}: expected each of {len(by_name)} outputs once, got {len(wanted)} wanted."
        )
    for name in wanted:
        if name not in by_name:
            raise InvalidCallError(
                f"model {request.model_name!r}: expected outputs among {', '.join(by_name)}, got {name!r}."
            )
        output = by_name[name]
        if output.dtype not in _NAMES:
            raise InvalidCallError(
                f"model {request.model_name!r}: expected outputs of {', '.join(DATATYPES)}, got {output.dtype}."
            )
        form = plain(output)
        reply.outputs.add(name=name, datatype=_NAMES[output.dtype], shape=output.shape)
        reply.raw_output_contents.append(bytes(raw_bytes(form)))
    return reply


def _datatype_of(hosted: HostedExpert) -> str:
    return _NAMES.get(hosted.spec.dtype or torch.float32, "FP32")


def _input_shape_of(hosted: HostedExpert) -> list[int]:
    """Return the shape of its input; where that may have any number of dimensions, those of a batch of rows."""
    spec = hosted.spec.tensor.message()
    return [-1] * spec.may_have_more + list(spec.shape)


def _output_shape_of(hosted: HostedExpert) -> list[int]:
    """Return the shape of its output, -1 for what is not known without calling it."""
    *leading, width = _input_shape_of(hosted)
    if isinstance(hosted.module, nn.Linear):
        return [*leading, hosted.module.out_features]
    return [*leading, width if isinstance(hosted.module, KEEPS_SHAPE) else -1]


def _make(message: str, /, **fields: Any) -> Any:
    return MESSAGES[message](**fields)
