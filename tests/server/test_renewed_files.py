"""Certificates and tokens that are read in an unlucky moment: half replaced, or while their disk hangs."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import shutil
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import SecurityConfig, ServingConfig
from experts_server.serving import followed
from experts_server.serving.certificates import _Certificates, check_credentials
from experts_server.serving.security import Gate
from moe_autograd.errors import ConfigError, PermissionDeniedError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.certificates import channel_credentials
from moe_autograd.wire.framing import seal
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.certificates import make_certificates, openssl
from tests.support.parcels import messages_of
from tests.support.servers import START_S, ServerProcess, WireClient, wait_until, wait_until_inside

OLD, NEW = "token-of-yesterday", "token-of-tomorrow-which-is-longer"
ONES = torch.ones(2, 4)
HALF = 200
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture
def in_use(certificates: Path, tmp_path: Path) -> Path:
    """A folder with the server's files, which are to be replaced by those of the client."""
    for name in ("ca.pem", "server.pem", "server.key"):
        shutil.copy(certificates / name, tmp_path)
    return tmp_path


def serve(folder: Path) -> _Certificates:
    served = _Certificates(folder / "server.pem", folder / "server.key", None)
    served.take(served.read())
    return served


def cut(whole: Path, file: Path) -> None:
    file.write_bytes(whole.read_bytes()[:HALF])


def before_openssl_reads(patch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something else just before each time."""
    for name in ("load_cert_chain", "load_verify_locations"):
        read = getattr(ssl.SSLContext, name)

        def read_later(*args: Any, read: Callable[..., None] = read, **options: Any) -> None:
            do()
            read(*args, **options)

        patch.setattr(ssl.SSLContext, name, read_later)


def fail() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def fail_to_read(path: Path) -> bytes:
    fail()
    return b""


def test_a_server_shows_no_certificate_that_was_cut_short_when_it_was_read(
    certificates: Path, in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whole when OpenSSL looked: grpc would refuse each who connects."""
    served = serve(in_use)
    shutil.copy(certificates / "client.key", in_use / "server.key")
    cut(certificates / "client.pem", in_use / "server.pem")
    before_openssl_reads(monkeypatch, lambda: shutil.copy(certificates / "client.pem", in_use / "server.pem"))
    assert served.renewed() is None
    assert served.renewed() is not None
    assert served.renewed() is None


def test_a_certificate_that_could_not_be_looked_at_is_looked_at_again_and_told_of_once(
    certificates: Path,
    in_use: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = serve(in_use)
    for end in ("pem", "key"):
        shutil.copy(certificates / f"client.{end}", in_use / f"server.{end}")
    with monkeypatch.context() as now:
        before_openssl_reads(now, fail)
        assert [served.renewed(), served.renewed()] == [None, None]
    assert len(caplog.records) == 1
    assert "certificates stay as they were" in caplog.text
    assert served.renewed() is not None


def test_a_certificate_that_no_client_takes_does_not_take_the_place_of_another_one(
    in_use: Path, caplog: pytest.LogCaptureFixture
) -> None:
    security = {"tls_cert": in_use / "server.pem", "tls_key": in_use / "server.key"}
    trusted = grpc.ssl_channel_credentials((in_use / "ca.pem").read_bytes())
    with ExpertsServer({"e": nn.Linear(4, 4)}, config=secured(**security)) as server:
        files = ("-keyout", in_use / "server.key", "-out", in_use / "server.pem")
        openssl("req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=localhost", *files)
        assert code_of_info(server.address, credentials=trusted) is None
    assert "certificates stay as they were" in caplog.text
    assert "with Ed25519" in caplog.text


def test_tokens_that_could_not_be_read_are_read_again_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"train {OLD}")
    gate = Gate(file)
    file.write_text(f"train {NEW}")
    with monkeypatch.context() as now:
        now.setattr(Path, "read_bytes", fail_to_read)
        for _ in range(2):
            with pytest.raises(PermissionDeniedError):
                asyncio.run(gate.check([("authorization", f"Bearer {NEW}")], "train"))
    assert len(caplog.records) == 1
    assert "tokens stay as they were" in caplog.text
    assert "(Too many open files)" in caplog.text
    asyncio.run(gate.check([("authorization", f"Bearer {NEW}")], "train"))
    with pytest.raises(PermissionDeniedError):
        asyncio.run(gate.check([("authorization", f"Bearer {OLD}")], "train"))


def test_a_token_that_is_taken_back_trains_no_longer_in_a_stream_that_is_open(tmp_path: Path) -> None:
    """Until it was closed by the client, which may be never."""
    file, config = tmp_path / "tokens", tmp_path / "server.toml"
    file.write_text(f"train {OLD}\ntrain {NEW}")
    config.write_text(
        f'listen = "127.0.0.1:0"\nupdate = "on_backward"\nsecurity = {{ tokens_file = "{file}" }}\n'
        '[experts.e]\nclass = "torch.nn:Linear"\nargs = { in_features = 4, out_features = 4 }\n'
    )
    with (
        ServerProcess("--config", str(config)) as server,
        WireClient(server.address, token=OLD) as client,
        WireClient(server.address, token=NEW) as other,
    ):
        sent: queue.Queue[bytes | None] = queue.Queue()
        writer = ParcelWriter()

        def send(call_id: int) -> None:
            writer.add(*client.backward_call("e", ONES, call_id=call_id, inputs=[ONES]))
            for message in messages_of(writer):
                sent.put(message)

        answers = client.stream_messages("Backward", iter(sent.get, None))
        for call_id in (1, 2):
            send(call_id)
            assert next(answers)[1].code == "OK"
        file.write_text(f"train {NEW}")
        wait_until(lambda: code_of_info(server.address, OLD) == PERMISSION_DENIED)
        send(3)
        with pytest.raises(grpc.RpcError, match="expected a token that it knows") as refused:
            next(answers)
        assert refused.value.code() == PERMISSION_DENIED
        assert other.num_updates() == {"e": 2}
        sent.put(None)


def test_a_change_of_other_tokens_ends_no_stream(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"read {OLD}")
    with (
        ExpertsServer({"e": nn.Linear(4, 4)}, config=secured(tokens_file=file)) as server,
        WireClient(server.address, token=OLD) as client,
    ):
        sent: queue.Queue[bytes | None] = queue.Queue()
        writer = ParcelWriter()
        answers = client.stream_messages("Forward", iter(sent.get, None))
        for call_id in (1, 2):
            writer.add(*client.forward_call("e", ONES, call_id=call_id))
            for message in messages_of(writer):
                sent.put(message)
            assert next(answers)[1].code == "OK"
            file.write_text(f"read {OLD}\nread {NEW}")
            wait_until(lambda: code_of_info(server.address, NEW) is None)
        sent.put(None)
        assert list(answers) == []


def test_a_token_that_is_taken_back_gets_no_more_of_the_weights_that_are_on_their_way(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"read {OLD}\nread {NEW}")
    experts = {"e": nn.Linear(4096, 4096)}  # 64 MiB: more than what is on its way while nobody reads
    with (
        ExpertsServer(experts, config=secured(tokens_file=file)) as server,
        WireClient(server.address) as client,
    ):
        method = client.channel.unary_stream(methods.path("GetState"))
        header = [("authorization", f"Bearer {OLD}")]
        parts = method(seal(pb.GetStateRequest()), timeout=START_S, metadata=header)
        next(parts)
        file.write_text(f"read {NEW}")
        wait_until(lambda: code_of_info(server.address, OLD) == PERMISSION_DENIED)
        with pytest.raises(grpc.RpcError) as refused:
            list(parts)
        assert refused.value.code() == PERMISSION_DENIED


class Hanging:
    """A disk: reads of files do not end until it goes on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.num_reads, read = threading.Event(), 0, Path.read_bytes

        def read_bytes(path: Path) -> bytes:
            self.num_reads += 1
            assert self.may_go_on.wait(START_S)
            return read(path)

        patch.setattr(Path, "read_bytes", read_bytes)


def test_a_server_goes_on_with_its_tokens_while_their_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "PATIENCE_S", 0.01)
    file = tmp_path / "tokens"
    file.write_text(f"train {OLD}")
    with ExpertsServer({"e": nn.Linear(4, 4)}, config=secured(tokens_file=file)) as server:
        file.write_text(f"train {NEW}")
        disk = Hanging(monkeypatch)
        for token, code in ((NEW, PERMISSION_DENIED), (OLD, None), (NEW, PERMISSION_DENIED), (OLD, None)):
            assert code_of_info(server.address, token) == code
        assert disk.num_reads == 1, "no second one, beside that which hangs"
        disk.may_go_on.set()
        wait_until(lambda: code_of_info(server.address, NEW) is None)
        assert code_of_info(server.address, OLD) == PERMISSION_DENIED


def test_a_server_takes_connections_while_the_disk_of_its_certificates_hangs(
    certificates: Path, in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "PATIENCE_S", 0.01)
    security = {"tls_cert": in_use / "server.pem", "tls_key": in_use / "server.key"}
    trusted = grpc.ssl_channel_credentials((in_use / "ca.pem").read_bytes())
    with ExpertsServer({"e": nn.Linear(4, 4)}, config=secured(**security)) as server:
        disk = Hanging(monkeypatch)
        for _ in range(3):
            assert code_of_info(server.address, credentials=trusted) is None
        assert disk.num_reads == 1
        server.stop()
        disk.may_go_on.set()


def test_a_client_that_goes_while_tokens_are_looked_at_is_no_failure_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"train {OLD}")
    monkeypatch.setattr(followed, "PATIENCE_S", START_S)
    with ExpertsServer({"e": nn.Linear(4, 4)}, config=secured(tokens_file=file)) as server:
        file.write_text(f"train {NEW}")
        disk = Hanging(monkeypatch)
        with WireClient(server.address) as client:
            info = client.channel.unary_unary(methods.path("Info"))
            call = info.future(b"", metadata=[("authorization", f"Bearer {NEW}")])
            wait_until(lambda: disk.num_reads == 1)
            call.cancel()
        wait_until_inside(server, 0)
        disk.may_go_on.set()
        assert code_of_info(server.address, NEW) is None
    assert "failed" not in caplog.text


def test_a_look_that_fails_is_no_end_of_looks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if looks[-1] == 0:
            raise ValueError("the first one")

    files = followed.Looks(look)
    for number in (1, 2):
        files.now()
        assert len(looks) == number
    assert "ValueError: the first one" in caplog.text


def test_a_folder_that_may_not_be_entered_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:  # root may enter any
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(ConfigError, match=r"expected a file, got '.*tokens' \(Permission denied\)"):
        followed.refuse_pipes(tmp_path / "tokens")


@pytest.mark.parametrize("name", ["tokens", "server.pem"])
def test_a_pipe_in_the_place_of_a_file_is_not_read(
    name: str, certificates: Path, in_use: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody may ever write to it."""
    (in_use / "tokens").write_text(f"train {OLD}")
    security = {"tls_cert": in_use / "server.pem", "tls_key": in_use / "server.key"}
    trusted = grpc.ssl_channel_credentials((in_use / "ca.pem").read_bytes())
    config = secured(tokens_file=in_use / "tokens", **security)
    with ExpertsServer({"e": nn.Linear(4, 4)}, config=config) as server:
        (in_use / name).unlink()
        os.mkfifo(in_use / name)
        assert code_of_info(server.address, NEW, trusted) == PERMISSION_DENIED
        assert code_of_info(server.address, OLD, trusted) is None
        assert f"{name}', which is none. Put one there again." in caplog.text
        (in_use / "tokens").unlink()
        (in_use / "tokens").write_text(f"train {NEW}")
        assert code_of_info(server.address, NEW, trusted) is None


def secured(**security: Path) -> ServingConfig:
    return ServingConfig(security=SecurityConfig(**security))


def code_of_info(
    address: str, token: str | None = None, credentials: grpc.ChannelCredentials | None = None
) -> grpc.StatusCode | None:
    """Connect and ask; return how it was refused, if it was."""
    with WireClient(address, token=token, credentials=credentials) as client:
        try:
            client.info()
        except grpc.RpcError as refused:
            return refused.code()
    return None


def test_a_client_uses_no_certificate_that_was_cut_short_when_it_was_read(
    certificates: Path, in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(certificates / "ca.pem", in_use / "ca.pem")
    before_openssl_reads(monkeypatch, lambda: shutil.copy(certificates / "ca.pem", in_use / "ca.pem"))
    with pytest.raises(ValueError, match=r"stay as they are while they are read, got some that are replaced"):
        channel_credentials(in_use / "ca.pem", None, None)
    channel_credentials(in_use / "ca.pem", None, None)


def test_a_client_names_the_file_that_has_gone_since_it_was_read(
    in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_openssl_reads(monkeypatch, (in_use / "ca.pem").unlink)
    with pytest.raises(ValueError, match=r"got '.*ca\.pem' \(.*No such file or directory\)"):
        channel_credentials(in_use / "ca.pem", None, None)


def test_a_pipe_in_the_place_of_a_certificate_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="which is none"):
        check_credentials(SecurityConfig(tls_cert=pipe, tls_key=pipe))
