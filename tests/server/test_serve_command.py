"""`experts-server serve` and `info` as an operator meets them: real processes, real signals, real ports."""

from __future__ import annotations

import atexit
import gc
import json
import signal
import socket
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from experts_server import ExpertsServer
from experts_server.command.cli import main
from experts_server.command.daemon import SIGNALS
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.errors import ConfigError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.hosting import sgd
from tests.support.servers import ServerProcess, WireClient, tokens
from tests.support.subprocesses import run_command

NO_ADDRESS = "address: expected HOST:PORT, such as 127.0.0.1:31415 or [::1]:31415"
FLAGS = ("--expert", "ffn", "--num-experts", "3", "--d-model", "8", "--optimizer", "adam", "--lr", "1e-3")


def command(*arguments: str) -> Result:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})
    finally:  # `serve` lets signals end its process, which is ours here
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_serve_prints_one_line_with_its_address_serves_and_exits_0_on_sigterm() -> None:
    with ServerProcess(*FLAGS, is_warm=False) as server:
        with WireClient(server.address) as client:
            assert [e.name for e in client.info().experts] == ["ffn.0", "ffn.1", "ffn.2"]
            assert client.forward("ffn.2", tokens(4, 8)).code == "OK"
        assert server.stop() == 0
    assert any("stopped" in line for line in server.log)


def test_the_log_can_be_json_one_event_a_line() -> None:
    with ServerProcess(*FLAGS, "--log-format", "json") as server:
        assert server.stop() == 0
    events = [json.loads(line) for line in server.log]
    messages = [event["message"].split(":")[0] for event in events]
    assert (messages[0], messages[-1]) == ("ready", "stopped")
    assert all(event.keys() == {"time", "level", "logger", "message"} for event in events)


class Warns(nn.Linear):
    """Has a warning for whoever trains it, of two lines."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        warnings.warn("mind\nthe gap", stacklevel=1)


def test_warnings_are_events_of_the_log() -> None:
    with ServerProcess("--expert", f"{__name__}:Warns", "--log-format", "json") as server:
        assert server.stop() == 0
    (warned,) = [event for event in map(json.loads, server.log) if event["level"] == "warning"]
    assert "UserWarning: mind\nthe gap" in warned["message"]


class BesideTriton(nn.Linear):
    """Tells at exit whether objects are frozen: of its own, Triton (3.9) writes a page about them on stderr."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        sys.modules.setdefault("triton", types.ModuleType("triton"))  # torch for CPUs alone comes without it
        atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0, file=sys.stderr))


def test_at_its_end_nothing_of_triton_is_frozen() -> None:
    with ServerProcess("--expert", f"{__name__}:BesideTriton") as server:
        assert server.stop() == 0
    assert "frozen: False\n" in server.log


def test_serve_listens_beyond_loopback_only_if_it_is_told_so() -> None:
    with ServerProcess(*FLAGS, "--listen", "0.0.0.0:0", "--insecure") as server:
        host, _, port = server.address.rpartition(":")
        assert host == "0.0.0.0"
        with WireClient(f"127.0.0.1:{port}") as client:
            assert client.forward("ffn.2", tokens(4, 8)).code == "OK"


def test_serve_reads_a_config_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'listen = "127.0.0.1:0"\nupdate = "on_step"\n'
        '[experts."ffn.[0:2]"]\nclass = "swiglu"\nargs = { d_model = 8, d_ff = 4 }\n'
    )
    with (
        ServerProcess("--config", str(file), "--update", "on_backward") as server,
        WireClient(server.address) as client,
    ):
        experts = client.info().experts
        assert [(e.kind, e.update) for e in experts] == [("SwiGLUExpert", 1)] * 2


def test_a_rate_without_an_optimizer_is_that_of_the_one_by_default() -> None:
    flags = ("--expert", "ffn", "--d-model", "8", "--lr", "0.5", "--update", "on_backward")
    with ServerProcess(*flags) as server, WireClient(server.address) as client:
        before = client.get_state("ffn.0")["ffn.0"]
        client.forward("ffn.0", tokens(2, 8))
        assert client.backward("ffn.0", tokens(2, 8)).code == "OK"
        after = client.get_state("ffn.0")["ffn.0"]
    moved = after["down.bias"] - before["down.bias"]
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.5), rtol=1e-3, atol=0.0)  # by Adam


@pytest.mark.parametrize("is_in_file", [True, False])
@pytest.mark.parametrize("value", ["tokens", '{ tokens_file = "tokens" '])
def test_serve_does_not_go_on_without_a_security_that_is_no_table(
    value: str, is_in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ()
    if is_in_file:
        (tmp_path / "server.toml").write_text(f"security = {value!r}\n")
        config = ("--config", str(tmp_path / "server.toml"))
    else:
        monkeypatch.setenv("EXPERTS_SERVER_SECURITY", value)
    shown = command("serve", *FLAGS, *config, "--listen", "127.0.0.1:0", "--checkpoint-dir", __file__)
    assert shown.exit_code == 1
    assert "key 'security': expected a table, got '...'" in " ".join(shown.output.split())


def test_info_shows_a_table_and_json() -> None:
    with ExpertsServer({"ffn.0": FeedForwardExpert(8), "ffn.10": FeedForwardExpert(8)}) as server:
        table, as_json = command("info", server.address), command("info", server.address, "--json")
    assert table.exit_code == as_json.exit_code == 0
    assert "FeedForwardExpert" in table.output
    shown = json.loads(as_json.output)
    assert [e["name"] for e in shown["experts"]] == ["ffn.0", "ffn.10"]
    assert shown["experts"][0]["inputs"] == ["(*, 8) float32"]


def test_info_shows_how_an_expert_is_trained() -> None:
    experts = {"still": nn.Identity(), "ffn": FeedForwardExpert(8)}
    with ExpertsServer(experts, optimizer=sgd, update="on_backward") as server:
        lines = command("info", server.address).output.splitlines()
    shown = {line.split()[0]: line.split() for line in lines if line.split()}
    assert shown["ffn"][-3:] == ["SGD", "on_backward", "0"]
    assert shown["still"][-3:] == ["-", "-", "0"]


def test_info_of_a_server_that_is_not_there_says_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        shown = command("info", address, "--timeout-s", "20")
    assert shown.exit_code == 1
    assert " ".join(shown.output.split()) == (
        f"Error: server at {address}: expected a connection, got 'Connection refused'. "
        "Is the server started, is this its address, do both use TLS or neither, does it want a certificate of yours?"
    )


def test_info_of_several_servers_shows_those_that_answer_and_names_the_others() -> None:
    with (
        socket.socket() as unused,
        ExpertsServer({"ffn.0": FeedForwardExpert(8)}) as one,
        ExpertsServer({"ffn.1": FeedForwardExpert(8)}) as two,
    ):
        unused.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{unused.getsockname()[1]}"
        all_there = command("info", one.address, two.address, "--json")
        assert all_there.exit_code == 0
        assert [server["address"] for server in json.loads(all_there.stdout)] == [one.address, two.address]
        table = command("info", one.address, away, two.address, away)
        assert (table.exit_code, "ffn.0" in table.stdout, "ffn.1" in table.stdout) == (1, True, True)
        assert table.stderr.count(f"Error: server at {away}: expected a connection") == 2
        as_json = command("info", away, two.address, "--json")
        assert as_json.exit_code == 1
        assert [expert["name"] for server in json.loads(as_json.stdout) for expert in server["experts"]] == [
            "ffn.1"
        ]
        twice = command("info", one.address, one.address, "--json")
        assert [server["address"] for server in json.loads(twice.stdout)] == [one.address] * 2


def test_an_answer_that_does_not_come_in_time_is_named_as_such() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        shown = command("info", address, "--timeout-s", "0.3")
    assert shown.exit_code == 1
    assert f"server at {address}: expected an answer within 0.3 s, got none" in " ".join(shown.output.split())


def test_an_address_of_another_machine_is_refused_as_such() -> None:
    config = ServingConfig(listen="192.0.2.1:31415", security=SecurityConfig(insecure=True))
    server = ExpertsServer({"e": FeedForwardExpert(8)}, config=config)
    with pytest.raises(ConfigError, match=r"expected an address of this machine, got 192\.0\.2\.1:31415 \("):
        server.start()


@pytest.mark.parametrize(
    ("flags", "says_so"),
    [((), True), (("--checkpoint-dir", "kept"), False), (("--optimizer", "none"), False)],
)
def test_a_server_that_trains_and_saves_nothing_says_so(
    flags: tuple[str, ...], says_so: bool, tmp_path: Path
) -> None:
    flags = tuple(str(tmp_path / flag) if flag == "kept" else flag for flag in flags)
    with ServerProcess("--expert", "ffn", "--d-model", "8", *flags) as server:
        assert server.stop() == 0
    assert any("no checkpoint_dir: what the experts learn ends" in line for line in server.log) == says_so


@pytest.mark.parametrize("other_is_grpc", [True, False])
def test_a_port_in_use_is_refused_and_named(other_is_grpc: bool) -> None:
    with ExpertsServer({"e": FeedForwardExpert(8)}) as first, socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        address = first.address if other_is_grpc else f"127.0.0.1:{plain.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"expected an address that is free, got {address} .Address already in use"
        ):
            ExpertsServer({"e": FeedForwardExpert(8)}, listen=address).start()
        with WireClient(first.address) as client:
            assert client.forward("e", tokens(2, 8)).code == "OK", "the first one lives on"


def test_serve_on_a_port_in_use_exits_1_with_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_command("serve", *FLAGS, "--listen", address)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.decode().strip() == (
        f"Error: server: expected an address that is free, got {address} (Address already in use). "
        "Stop what listens there, or choose another port; port 0 takes any free one."
    )


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("serve", "--config", "/no/such.toml"), 1, "config '/no/such.toml': expected a readable file"),
        (("serve",), 1, "key 'experts': expected at least one expert"),
        (("serve", "a.toml"), 2, "unexpected extra argument (a.toml) Did you mean --config a.toml?"),
        (("config", "a.toml"), 2, "Missing option '--check'. Did you mean --check a.toml?"),
        (("serve", "--config", "a.toml", "b.toml"), 2, "unexpected extra argument (b.toml)"),
        (("serve", "--d-model", "8"), 2, "expected --expert with them"),
        (("serve", "--expert", ""), 2, "--expert: expected the name of a class, got ''. Give one."),
        (("serve", "--expert", "a:"), 2, "--expert: expected the name of a class, got 'a:'. Give one."),
        (("serve", *FLAGS, "--listen", f"127.0.0.1:{'9' * 5000}"), 1, "expected a port from 0 to 65535"),
        (("info", "127.0.0.1:1", "--token-file", "/tmp"), 1, "(Is a directory). Check the path."),
        (
            ("serve", "--expert", "ffn", "--optimizer", "none", "--lr", "0.1"),
            2,
            "expected none with --optimizer none",
        ),
        (("serve", *FLAGS, "--listen", "0.0.0.0:0"), 1, "expected a loopback address or credentials"),
        (("serve", *FLAGS, "--listen", "nowhere.invalid:0"), 1, "expected a loopback address or credentials"),
        (("serve", *FLAGS, "--update", "never"), 2, "'never' is not one of"),
        (("serve", "--expert", "ffn"), 1, "Add d_model (as flags: --d-model)."),
        (("info",), 2, "Missing argument 'HOST:PORT...'"),
        (
            ("info", "nowhere"),
            1,
            f"{NO_ADDRESS}, got 'nowhere'",
        ),
        (("info", "127.0.0.1:1", "127.0.0.1:0"), 1, f"{NO_ADDRESS}, got '127.0.0.1:0'"),
        *(
            ((command, address, *rest), 1, f"{NO_ADDRESS}, got {address!r}")
            for address in (
                " 127.0.0.1:1",
                "a b:1",
                "[foo]:1",
                "a@b:1",
                "host:\u0663",
                "127.0.0.1:0",
                "https://a:1",
            )
            for command, rest in (("info", ()), ("save", ()), ("top", ()), ("export", ("e", "f")))
        ),
        *(
            (("info", "127.0.0.1:1", "--timeout-s", seconds), 2, "is not in the range 0<x<=1e+08")
            for seconds in ("0", "-1", "nan", "inf", "1e9")
        ),
        *(
            (("top", "127.0.0.1:1", "--interval-s", seconds), 2, "is not in the range 0.1<=x<=1e+08")
            for seconds in ("0", "nan", "inf", "1e30")
        ),
        *(
            (("serve", *FLAGS, option, address, "--insecure"), 1, f"key {key!r}: expected HOST:PORT, such as")
            for option, key in (("--listen", "listen"), ("--metrics-listen", "metrics_listen"))
            for address in ("127.0.0.1:\u0663", " 127.0.0.1:0", "[]:0", "[localhost]:0", "::1:0", "a b:0")
        ),
        *(
            (
                ("serve", *FLAGS, "--listen", "127.0.0.1:0", option, f"{'x' * 64}:0", "--insecure"),
                1,
                f"expected an address of this machine, got {'x' * 64}:0 (",
            )
            for option in ("--listen", "--metrics-listen")
        ),
        (
            ("import", "127.0.0.1:1", "e", "/proc/self/mem"),
            1,
            "file '/proc/self/mem': expected a readable one, got 'Input/output error'",
        ),
        (("info", "127.0.0.1:1", "--ca", __file__), 1, "TLS: expected certificates as PEM, got "),
        (("info", "127.0.0.1:1", "--ca", "/no/such"), 1, "TLS: expected a readable file, got '/no/such'"),
        (
            ("info", "127.0.0.1:1", "--cert", __file__, "--key", __file__),
            1,
            "expected a certificate and its key",
        ),
        (("top", "nowhere"), 1, "address: expected HOST:PORT"),
        (
            ("serve", *FLAGS, "--checkpoint-dir", ""),
            1,
            "flags, key 'checkpoint_dir': expected a path, written out (of a name that begins with '~': './~'), got ''",
        ),
    ],
)
def test_a_wrong_command_exits_with_one_clear_message(
    arguments: tuple[str, ...], status: int, text: str
) -> None:
    shown = command(*arguments)
    assert shown.exit_code == status
    assert text in " ".join(shown.output.split())
    assert "Traceback" not in shown.output
