"""What the commands ask of a running server, and how they show it."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import safetensors.torch
import torch
from rich.text import Text
from safetensors import SafetensorError

from experts_server.command.stdout import open_stream, to_stdout
from experts_server.command.tables import console_of_any_width, fit, plain_table
from experts_server.configuration.names import counted
from moe_autograd._contexts import contextmanager
from moe_autograd.errors import ConfigError, CorruptDataError, DeadlineExceededError, ServerUnavailableError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.addresses import host_of, in_certificate
from moe_autograd.wire.certificates import channel_credentials, read_certificate, remarks
from moe_autograd.wire.framing import seal, unseal
from moe_autograd.wire.options import CHANNEL_OPTIONS
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.status import error_of, error_of_rpc
from moe_autograd.wire.tensors import TensorLimits
from moe_autograd.wire.tokens import read_token

MOST_BYTES = 1 << 40  # of one tensor: whatever a server hosts can be exported
STANDARD = "-"  # output, or input, in place of a file; a file of that name is `./-`


@dataclass(frozen=True)
class _Line:
    """A connection and what goes with every RPC on it."""

    channel: grpc.Channel
    terms: dict[str, Any]

    def ask(self, rpc: str, sealed: bytes) -> bytes:
        return cast(bytes, self.channel.unary_unary(methods.path(rpc), None, None)(sealed, **self.terms))


@contextmanager
def _connected(
    address: str,
    *,
    token_file: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    timeout_s: float,
) -> Iterator[_Line]:
    """Connect; within, errors of grpc become ours."""
    metadata = () if token_file is None else (("authorization", f"Bearer {_token(token_file)}"),)
    credentials = _credentials(ca, cert, key)
    host = in_certificate(host_of(address))
    target = address if address.isascii() else f"{host}:{address.rpartition(':')[2]}"
    if credentials is None:
        channel = grpc.insecure_channel(target, CHANNEL_OPTIONS)
    else:
        named = ("grpc.ssl_target_name_override", host)
        channel = grpc.secure_channel(target, credentials, (*CHANNEL_OPTIONS, named))
    with channel:
        try:
            yield _Line(channel, {"timeout": timeout_s, "metadata": metadata})
        except grpc.RpcError as error:
            call = cast(Any, error)
            place = f"server at {address}"
            if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceededError(
                    f"{place}: expected an answer within {timeout_s} s, got none. Is the server overloaded?"
                ) from error
            ours = error_of_rpc(call.code(), call.details(), call.trailing_metadata(), place)
            if credentials is not None and isinstance(ours, ServerUnavailableError):
                ours = type(ours)(f"{ours} {_remarks(call.details() or '', ca, cert)}".rstrip())
            raise ours from error


def _remarks(details: str, ca: Path | None, cert: Path | None) -> str:
    """Return what certificates may have to do with a connection that failed, of which grpc says this."""
    try:
        contents = [None if file is None else read_certificate(file) for file in (ca, cert)]
    except (OSError, ValueError):  # gone since it was read
        return ""
    return remarks(details, ca, contents[0], cert, contents[1])


def _credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    if (cert is None) != (key is None):
        raise ConfigError("--cert and --key: expected both or neither, got one of them.")
    if ca is None and cert is None:
        return None
    try:
        return channel_credentials(ca, cert, key)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _token(file: Path) -> str:
    try:
        return read_token(file)
    except ValueError as error:
        hint = "" if error.__cause__ else " (The server's tokens_file has permissions as well.)"
        raise ConfigError(f"--token-file: {error}{hint}") from error


def ask_info(address: str, **connection: Any) -> pb.InfoReply:
    """Return what the server at `address` says of itself.

    Raises:
        RemoteError: it does not answer, or refuses; the subclass says why. So do the functions below.
    """
    with _connected(address, **connection) as line:
        return unseal(pb.InfoReply, line.ask("Info", seal(pb.InfoRequest())))


def ask_save(address: str, **connection: Any) -> str:
    """Let the server save; return the generation's name."""
    request = pb.SaveRequest(client_id=secrets.token_bytes(16), sequence=1)
    with _connected(address, **connection) as line:
        return unseal(pb.SaveReply, line.ask("Save", seal(request))).generation


def export_weights(address: str, expert: str, file: str, **connection: Any) -> None:
    """Write an expert's `state_dict` to a safetensors file; `-` is stdout, but for a terminal."""
    if file == STANDARD and sys.stdout is not None and sys.stdout.isatty():
        raise ConfigError(
            "export: expected a file or a pipe for the weights, got a terminal. Name a file, or pipe them on."
        )
    state = _fetched_state(address, expert, connection)
    try:
        content = safetensors.torch.save(state)
    except (KeyError, ValueError, SafetensorError) as error:  # each for another kind of tensor
        raise ConfigError(
            f"export: expected tensors that safetensors can hold, got one that it cannot ({error!r})."
        ) from error
    if file == STANDARD:
        with to_stdout():
            stream = open_stream("stdout", sys.stdout)
            stream.write(content)
            stream.flush()
        return
    try:
        _write_whole(Path(file), content)
    except OSError as error:
        raise ConfigError(
            f"export: expected a file to write to, got {file!r} ({error.strerror}). Check path and permissions."
        ) from error


def _fetched_state(address: str, expert: str, connection: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    reader = ParcelReader(TensorLimits.of_one_tensor(MOST_BYTES))
    state: dict[str, torch.Tensor] = {}
    num_entries = None
    with _connected(address, **connection) as line:
        call = line.channel.unary_stream(methods.path("GetState"), None, None)
        for message in call(seal(pb.GetStateRequest(experts=[expert])), **line.terms):
            for parcel in reader.feed(message):
                if isinstance(parcel.head, pb.StateUpdate):
                    num_entries = parcel.head.num_entries
                    continue
                tensor = parcel.tensors[0] if len(parcel.tensors) == 1 else None
                if not isinstance(parcel.head, pb.StateEntry) or tensor is None:
                    raise CorruptDataError(
                        f"expert {expert!r} at {address}, export: expected state entries of one tensor each, got "
                        f"{type(parcel.head).__name__} with {len(parcel.tensors)}. Check that it is an experts-server."
                    )
                state[parcel.head.key] = tensor.clone()  # safetensors wants memory that is not shared
    reader.finish()
    if num_entries != len(state):
        raise CorruptDataError(
            f"expert {expert!r} at {address}, export: expected {num_entries} entries, got {len(state)}. Try again."
        )
    return state


def import_weights(address: str, expert: str, file: str, **connection: Any) -> None:
    """Set an expert's weights to those of a safetensors file; all of them or, if they do not fit, none.

    The file `-` is stdin.
    """
    try:
        state = safetensors.torch.load(_read(file))
    except SafetensorError as error:
        raise ConfigError(
            f"import: expected a safetensors file, got {file!r} ({error}). Take what `experts-server export` wrote; of "
            "what torch.save wrote, safetensors.torch.save_file(torch.load(FILE), NEW_FILE) makes one."
        ) from error
    except KeyError as error:  # safetensors knows more dtypes than it gives to torch
        raise ConfigError(
            f"import: expected tensors of dtypes that travel, got {error} in {file!r}. Convert them first."
        ) from error
    if not state:
        raise ConfigError(
            f"import: expected tensors in {file!r}, got none. Take what `experts-server export` wrote of an expert "
            "that has weights."
        )
    writer = ParcelWriter()
    writer.add(pb.StateUpdate(client_id=secrets.token_bytes(16), sequence=1, num_entries=len(state)))
    for key, tensor in state.items():
        try:
            writer.add(pb.StateEntry(expert=expert, key=key), [tensor])
        except TypeError as error:
            raise ConfigError(f"import: {key!r} of {file!r}: {error}") from error
    with _connected(address, **connection) as line:
        call = line.channel.stream_unary(methods.path("SetState"), None, None)
        reply = unseal(pb.UpdateReply, cast(bytes, call(iter(writer.next_message, None), **line.terms)))
    place = f"expert {expert!r} at {address}"
    if (answered := [update.expert for update in reply.updates]) != [expert]:
        raise CorruptDataError(
            f"{place}, import: expected an answer for it, got those for {answered}. Check that it is an experts-server."
        )
    if (status := reply.updates[0].status).code != pb.OK:
        raise error_of(status, place)


def as_plain(address: str, reply: pb.InfoReply) -> dict[str, Any]:
    """Return the reply as what JSON can hold."""
    return {
        "address": address,
        "server_id": reply.server_id,
        "server_version": reply.server_version,
        "experts": [
            {
                "name": expert.name,
                "kind": expert.kind,
                "inputs": [_spec_text(spec) for spec in expert.inputs],
                "num_parameters": expert.num_parameters,
                "is_trained": expert.is_trained,
                "optimizer": expert.optimizer or None,
                "update": _update(expert),
                "num_updates": expert.num_updates,
            }
            for expert in reply.experts
        ],
    }


def print_table(address: str, reply: pb.InfoReply) -> None:
    """Print the experts as a table."""
    table = plain_table(f"{counted(len(reply.experts))} at {address} (version {reply.server_version})")
    for heading in ("expert", "class", "input"):
        table.add_column(heading, overflow="fold")  # whole: names that are long may differ anywhere
    table.add_column("parameters", justify="right", no_wrap=True)
    for heading in ("optimizer", "update"):
        table.add_column(heading, no_wrap=True)
    table.add_column("updates", justify="right", no_wrap=True)
    for expert in reply.experts:
        cells = (
            expert.name,
            expert.kind,
            ", ".join(_spec_text(spec) for spec in expert.inputs) or "any",
            f"{expert.num_parameters:,}",
            expert.optimizer or "-",
            _update(expert) or "-",
            f"{expert.num_updates:,}",
        )
        table.add_row(*map(Text, cells))
    console = console_of_any_width()
    console.print(fit(table, console.width))


def _spec_text(spec: pb.TensorSpec) -> str:
    dtype = "" if spec.dtype == pb.DTYPE_NONE else f" {_name_of(pb.DType, spec.dtype)}"
    sizes = ["..."] * spec.may_have_more + ["*" if size < 0 else str(size) for size in spec.shape]
    return f"({', '.join(sizes)}){dtype}"


def _update(expert: pb.ExpertInfo) -> str | None:
    return _name_of(pb.UpdateMode, expert.update) if expert.is_trained else None


def _name_of(kind: Any, number: int) -> str:
    """Return the name of a value; a newer server may have some that are not known here."""
    known = kind.DESCRIPTOR.values_by_number.get(number)
    return f"number {number}" if known is None else str(known.name).lower()


def _read(file: str) -> bytes:
    try:
        return open_stream("stdin", sys.stdin).read() if file == STANDARD else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"file {file!r}: expected a readable one, got {error.strerror!r}. Check path and permissions."
        ) from error


def _write_whole(file: Path, content: bytes) -> None:
    """Write a file so that its name stands for the whole content, or for what it was before; who may read it stays."""
    if file.exists() and not file.is_file():  # a device, or a pipe
        file.write_bytes(content)
        return
    file = file.resolve()
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as stream:
            if file.exists():
                os.fchmod(stream.fileno(), stat.S_IMODE(file.stat().st_mode))
            stream.write(content)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
