"""Who may call what: every RPC with no, wrong, read-only and right tokens; no token is shown, nor logged."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from click.testing import CliRunner

from experts_server import ExpertsServer
from experts_server.command.cli import main
from experts_server.configuration.config import SecurityConfig, ServingConfig
from experts_server.serving import security as security_module
from experts_server.serving.security import Gate, read_tokens
from moe_autograd.errors import ConfigError, PermissionDeniedError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from tests.support.hosting import sgd
from tests.support.servers import ServerProcess, WireClient, tokens, wait_until

TRAIN, READ = "train-token-of-length-32-and-more", "read-token-of-length-32-and-more"
D = 8


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertsServer]:
    folder = tmp_path_factory.mktemp("security")
    file = folder / "tokens"
    file.write_text(f"# who may do what\ntrain {TRAIN}\n\nread  {READ}   # the dashboard\n")
    config = ServingConfig(security=SecurityConfig(tokens_file=file), checkpoint_dir=folder / "saved")
    with ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, config=config) as server:
        yield server


CALLS = {
    "Info": lambda client: client.info(),
    "GetState": lambda client: client.get_state("e"),
    "Forward": lambda client: client.forward("e", tokens(2, D)),
    "Backward": lambda client: client.backward("e", tokens(2, D), inputs=[tokens(2, D)], call_id=9),
    "Step": lambda client: client.step(),
    "ZeroGrad": lambda client: client.zero_grad(),
    "SetState": lambda client: client.set_state({}),
    "Save": lambda client: client.save(),
    "Expect": lambda client: client.expect("e"),
    "Forget": lambda client: client.forget(e=1),
}
READING = {"Info", "GetState", "Forward", "Expect", "Forget"}


@pytest.mark.parametrize("rpc", CALLS)
@pytest.mark.parametrize(
    "token", [None, "wrong-token-of-length-32-and-more", READ[:-1], READ, TRAIN, "", "ä" * 32]
)
def test_each_rpc_is_accepted_exactly_where_its_token_allows_it(
    guarded: ExpertsServer, rpc: str, token: str | None
) -> None:
    allowed = token == TRAIN or (token == READ and rpc in READING)
    header = None if token is None else token.encode().decode("latin-1").encode("ascii", "replace").decode()
    with WireClient(guarded.address, token=header) as client:
        if allowed:
            CALLS[rpc](client)
        else:
            with pytest.raises(grpc.RpcError) as refused:
                CALLS[rpc](client)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert token is None or token == "" or token not in refused.value.details()


def test_the_table_above_names_every_rpc() -> None:
    service = pb.DESCRIPTOR.services_by_name["Experts"]
    assert set(CALLS) == {method.name for method in service.methods}


def test_another_scheme_than_bearer_is_refused(guarded: ExpertsServer) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        info = channel.unary_unary("/moe_autograd.v1.Experts/Info")
        for header in (TRAIN, f"Basic {TRAIN}", f"bearer{TRAIN}"):
            with pytest.raises(grpc.RpcError) as refused:
                info(seal(pb.InfoRequest()), metadata=(("authorization", header),), timeout=30)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("admin 0123456789abcdef", "line 1: expected 'read' or 'train' and a token, got another first word."),
        ("\n0123456789abcdef", "line 2: expected 'read' or 'train' and a token, got one word."),
        ("read 0123456789abcdef me", "line 1: expected 'read' or 'train' and a token, got 3 words."),
        ("train short", "expected a token of at least 16 characters, got 5"),
        ("# nothing", "expected tokens in"),
        ("train 0123456789abcdef\u00e9", "line 1: token: expected 1 to 4096 printable characters of ASCII"),
    ],
)
def test_a_tokens_file_that_is_none_is_refused_without_showing_a_token(
    tmp_path: Path, content: str, text: str
) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_tokens(file)
    assert text in str(refused.value)
    assert "0123456789abcdef" not in str(refused.value)


def test_a_comment_begins_with_a_word_and_no_token_ends_there(tmp_path: Path) -> None:
    """It would count up to there: a shorter one, which nobody has made."""
    file = tmp_path / "tokens"
    file.write_bytes(
        b"\xef\xbb\xbf# from an editor of Windows\r\nread 0123456789abcdef#tail #mine\r\n\t# end"
    )
    gate = Gate(file)
    asyncio.run(gate.check([("authorization", "Bearer 0123456789abcdef#tail")], "read"))
    with pytest.raises(PermissionDeniedError, match="a token that it knows"):
        asyncio.run(gate.check([("authorization", "Bearer 0123456789abcdef")], "read"))


def test_a_tokens_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = ServingConfig(security=SecurityConfig(tokens_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"key .security\.tokens_file.: expected a readable file"):
        ExpertsServer({"e": FeedForwardExpert(D)}, config=config).start()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("SECURITY__TOKEN", "key 'security.token': expected one of"),
        ("SECURITY__TLS_KEYS", "key 'security.tls_keys': expected one of"),
        ("SECURITY", "key 'security': expected a table"),
        ("TOKEN", "key 'token': expected one of"),
        ("SECURITY__TOKENS_FILE", "key 'security.tokens_file': expected a readable file"),
    ],
)
def test_a_token_in_the_place_of_something_else_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, text: str
) -> None:
    monkeypatch.setenv(f"EXPERTS_SERVER_{key}", TRAIN)
    file = tmp_path / "server.toml"
    file.write_text('listen = "127.0.0.1:0"\nexperts.e.class = "identity"\n')
    shown = CliRunner().invoke(main, ["config", "--check", str(file)])
    assert (shown.exit_code, text in shown.output, TRAIN in shown.output) == (1, True, False), shown.output


def test_a_gate_shows_and_keeps_no_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"train {TRAIN}")
    gate = Gate(file)
    assert TRAIN not in repr(gate) + repr(vars(gate))


def test_a_tokens_file_that_was_written_with_its_time_of_before_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"train {TRAIN}")
    gate, before = Gate(file), file.stat()

    def replace() -> bool:
        file.write_text(f"train {TRAIN[::-1]}")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return file.stat().st_ctime_ns != before.st_ctime_ns  # a clock that goes on every few ms

    wait_until(replace)
    asyncio.run(gate.check([("authorization", f"Bearer {TRAIN[::-1]}")], "train"))
    with pytest.raises(PermissionDeniedError):
        asyncio.run(gate.check([("authorization", f"Bearer {TRAIN}")], "train"))


SHOWN = [("authorization", f"Bearer {TRAIN}")]


@pytest.fixture
def of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tokens that is looked at whenever that is asked for."""
    monkeypatch.setattr(security_module, "_LOOK_INTERVAL_S", 0.0)
    file = tmp_path / "tokens"
    file.write_text(f"train {TRAIN}\nread {READ}")
    return file


def test_a_token_that_is_taken_back_is_refused_at_the_next_look(of_two: Path) -> None:
    gate = Gate(of_two)
    assert asyncio.run(gate.check(SHOWN, "train")) == "train"
    of_two.write_text(f"read {READ}")
    with pytest.raises(PermissionDeniedError):
        asyncio.run(gate.check(SHOWN, "read"))


def test_a_stream_that_is_open_hears_of_other_tokens_though_nobody_else_calls(of_two: Path) -> None:
    gate = Gate(of_two)
    before = asyncio.run(gate.edition_now())
    assert asyncio.run(gate.edition_now()) == before
    of_two.write_text(f"read {READ}")
    after = asyncio.run(gate.edition_now())
    assert after != before
    assert asyncio.run(gate.edition_now()) == after


def test_tokens_are_not_looked_at_for_every_call(of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(of_two)
    monkeypatch.setattr(security_module, "_LOOK_INTERVAL_S", 1e6)
    for _ in range(2):
        assert asyncio.run(gate.check(SHOWN, "train")) == "train"
        of_two.write_text(f"read {READ}")


def test_trouble_with_tokens_that_comes_back_is_told_of_again(
    of_two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, whole = Gate(of_two), of_two.read_text()
    for text in ("none", whole, "none"):
        of_two.write_text(text)
        asyncio.run(gate.edition_now())
        assert asyncio.run(gate.check(SHOWN, "train")) == "train"
    assert caplog.text.count("tokens stay as they were") == 2


def test_no_token_and_no_tensor_gets_into_the_log(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"train {TRAIN}\nread {READ}")
    file, wrong = tmp_path / "server.toml", "wrong-token-of-length-32-and-more"
    file.write_text(
        f'listen = "127.0.0.1:0"\ncheckpoint_dir = "{tmp_path}/saved"\n[security]\ntokens_file = "{tmp_path}/tokens"\n'
        '[experts.e]\nclass = "ffn"\nargs = { d_model = 2 }\n'
    )
    secret = torch.tensor([[1234.5678, 8765.4321]])
    with ServerProcess("--config", str(file), "--log-level", "debug") as server:
        for token in (TRAIN, READ, wrong):
            with WireClient(server.address, token=token) as client:
                for call in (
                    lambda c: c.forward("e", secret),
                    lambda c: c.forward("e", secret / 0),
                    lambda c: c.forward("e", secret.T),
                    lambda c: c.backward("e", secret, inputs=[secret], call_id=9),
                    lambda c: c.stream_messages("Forward", [b"noise"]),
                    lambda c: c.step(),
                    lambda c: c.save(),
                ):
                    with contextlib.suppress(grpc.RpcError):
                        call(client)
        assert server.stop() == 0
    log = "".join(server.log)
    assert "stopped" in log
    assert [
        word for word in (TRAIN, READ, wrong, "1234.5", "1.2346e", "8765.4", "8.7654e") if word in log
    ] == []


TELLS = """
import torch

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError(f"cannot: {grad.tolist()}")

class Tells(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        if (x < 0).any():
            raise ValueError(f"cannot: {x.tolist()}")
        return x * Raises.apply(self.weight)
"""


@pytest.mark.parametrize("split_backward", ["true", "false"])
def test_what_an_experts_own_errors_tell_of_its_tensors_is_told_to_the_client_alone(
    tmp_path: Path, split_backward: str
) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    file = tmp_path / "server.toml"
    file.write_text(
        f'listen = "127.0.0.1:0"\nmemory = {{ split_backward = {split_backward} }}\n'
        '[experts.e]\nclass = "tells:Tells"\n'
    )
    secret = torch.tensor([[1234.5, 8765.5]])
    with (
        ServerProcess("--config", str(file), "--log-level", "debug", path=tmp_path) as server,
        WireClient(server.address) as client,
    ):
        assert "1234.5" in client.forward("e", -secret).text
        client.forward("e", secret)
        told = client.backward("e", secret).text + client.step().updates[0].status.message
        # The gradient of the weight is the input times that of the output.
        assert "1234.5" in told or "1523990" in told
        assert server.stop() == 0
    assert [line for line in server.log if "1234.5" in line or "8765.5" in line or "1523990" in line] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--token-file", "tokens"), "without blanks, got ' ' at position 5"),
        (("--token-file", TRAIN), "got none (No such file or directory). Check the path.\n"),
        (("--cert", "tokens"), "--cert and --key: expected both or neither"),
        (("--ca", "none"), "TLS: expected a readable file, got '"),
    ],
)
def test_credentials_that_are_none_are_refused_before_anything_is_sent(
    guarded: ExpertsServer, arguments: tuple[str, str], text: str, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"train {TRAIN}")
    option, file = arguments
    shown = CliRunner().invoke(main, ["info", guarded.address, option, str(tmp_path / file)])
    assert (shown.exit_code, text in shown.output, TRAIN in shown.output) == (1, True, False), shown.output


def test_commands_show_their_token(guarded: ExpertsServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{READ}\n")
    for command, status in ((["info", guarded.address], 0), (["save", guarded.address], 1)):
        shown = CliRunner().invoke(main, [*command, "--token-file", str(tmp_path / "token")])
        assert shown.exit_code == status, shown.output
    assert "expected a token with permission 'train'" in " ".join(shown.output.split())
