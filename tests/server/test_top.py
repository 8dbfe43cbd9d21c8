"""`top` and `info` where they are looked at: in a terminal of eighty columns, and in a pipe."""

from __future__ import annotations

import fcntl
import functools
import http.server
import io
import os
import pty
import re
import signal
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner
from rich.console import Console

from experts_server import ExpertsServer
from experts_server.command.cli import main
from experts_server.command.console import print_table
from experts_server.command.tables import fit, fit_screen
from experts_server.command.top import Reading, Totals, read, table_of
from experts_server.configuration.config import ServingConfig
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.wire import experts_pb2 as pb
from tests.support.servers import START_S, ServerProcess, WireClient, tokens
from tests.support.subprocesses import run_command
from tests.support.warm import COMMAND, WarmProcess

D = 8
NUM_EXPERTS = 40
LONG = "a-name." + "of-its-own." * 8 + "expert"


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertsServer]:
    experts = {f"ffn.{index}": FeedForwardExpert(D) for index in range(NUM_EXPERTS)} | {
        LONG: FeedForwardExpert(D)
    }
    with ExpertsServer(experts, config=ServingConfig(metrics_listen="127.0.0.1:0")) as server:
        yield server


class Terminal:
    """Runs a command in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int, lines: int, term: str = "xterm") -> None:
        self._screen, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        drops = "[os.environ.pop(name, None) for name in ('COLUMNS', 'LINES', 'NO_COLOR')]"
        program = f"import os; {drops}; os.environ['TERM'] = {term!r}; {COMMAND}"
        self.process = WarmProcess(program, *arguments, stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)
        self.written = ""

    def read(self) -> bool:
        """Wait for more; return whether there was any."""
        try:
            more = os.read(self._screen, 1 << 16)
        except OSError:  # it has ended
            return False
        self.written += more.decode(errors="replace")
        return bool(more)

    def read_until(self, text: str, since: int = 0) -> None:
        """Wait until this has been written after so many characters."""
        while text not in self.written[since:]:
            assert self.read(), self.written

    def lines(self) -> list[str]:
        """Return what was written, without colours and movements."""
        return re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", self.written).replace("\r", "\n").split("\n")

    def end(self) -> int:
        while self.read():
            pass
        os.close(self._screen)
        return self.process.wait(START_S)


def test_top_fits_a_terminal_shows_the_busiest_and_ends_at_ctrl_c(server: ExpertsServer) -> None:
    assert server.metrics_address is not None
    terminal = Terminal("top", server.metrics_address, "--interval-s", "0.1", columns=80, lines=24)
    with WireClient(server.address) as client:
        number = 0
        while "\nffn.39     " not in "\n".join(terminal.lines()):
            assert terminal.read(), terminal.written
            number += 1
            assert client.forward("ffn.39", tokens(4, D), call_id=number).code == "OK"
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0, terminal.written
    lines = terminal.lines()
    assert max(len(line) for line in lines) <= 80
    head = " +".join(
        [
            "^expert",
            "calls/s",
            "tokens/s",
            "busy %",
            "queue ms",
            "compute ms",
            "waiting",
            "failed",
            "updates$",
        ]
    )
    assert any(re.search(head, line.strip()) for line in lines), lines
    assert f"the busiest 19 of {NUM_EXPERTS + 1}" in (line.strip() for line in lines)


def test_top_asks_the_server_itself_whatever_proxy_the_environment_names(
    server: ExpertsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert server.metrics_address is not None
    assert read(server.metrics_address).of("ffn.0", "updates") == 0


def test_top_of_an_address_where_nobody_answers_says_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        shown = CliRunner().invoke(main, ["top", f"127.0.0.1:{unused.getsockname()[1]}"])
    assert shown.exit_code == 1
    assert "got 'Connection refused'. Is the server started with metrics_listen" in shown.output


def test_top_of_a_port_that_does_not_speak_http_says_so(server: ExpertsServer) -> None:
    with pytest.raises(
        ServerUnavailableError, match=r"got one that is no HTTP\. .*metrics_listen"
    ) as refused:
        read(server.address)
    assert str(refused.value).isprintable(), "what a gRPC server answers would move the terminal's cursor"


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_top_on_a_dumb_terminal_writes_each_look_below_the_other(server: ExpertsServer, term: str) -> None:
    """Nothing had been shown until Ctrl-C."""
    assert server.metrics_address is not None
    top = ("top", server.metrics_address, "--interval-s", "0.1")
    terminal = Terminal(*top, columns=40, lines=12, term=term)
    for _ in range(2):
        terminal.read_until("too narrow for:", since=len(terminal.written))
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0, terminal.written
    assert "\x1b" not in terminal.written, "nothing that such a terminal would show as it is"
    assert max(map(len, terminal.lines())) <= 40


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Have somebody answer each request over HTTP so, at the address that this returns."""
    answers: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[-1])

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()

        def answer(text: bytes) -> str:
            answers.append(text)
            return f"127.0.0.1:{other.server_port}"

        yield answer
        other.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (b"<html>hello</html>", "no experts_server_ready among its lines"),
        (b"node_cpu_seconds_total 1\n", "no experts_server_ready among its lines"),
        (b'experts_server_ready 1.0\nexperts_updates{expert="ff', "could not convert string to float"),
    ],
    ids=["page", "another exporter", "cut short"],
)
def test_top_of_what_is_not_the_metrics_of_a_server_of_experts_says_so(
    answering: Callable[[bytes], str], answer: bytes, got: str
) -> None:
    """An empty table had been shown, or a traceback."""
    shown = CliRunner().invoke(main, ["top", answering(answer), "--looks", "1", "--interval-s", "0.1"])
    assert shown.exit_code == 1
    assert re.search(
        rf"expected an answer, got .{got}.*\. Is the server started with metrics_listen", shown.output
    )


def test_top_in_a_pipe_writes_each_look_below_the_other(server: ExpertsServer) -> None:
    assert server.metrics_address is not None
    shown = CliRunner().invoke(main, ["top", server.metrics_address, "--interval-s", "0.1", "--looks", "2"])
    assert shown.exit_code == 0, shown.output
    assert [line.split(", ")[0] for line in shown.output.splitlines() if line.startswith("experts at")] == [
        f"experts at {server.metrics_address}"
    ] * 2
    assert shown.output.endswith("\n")


def test_top_takes_the_address_that_the_log_names(server: ExpertsServer) -> None:
    shown = CliRunner().invoke(main, ["top", f"http://{server.metrics_address}/metrics", "--looks", "1"])
    assert shown.exit_code == 0, shown.output
    assert f"experts at {server.metrics_address}" in shown.output


def test_top_says_that_its_server_is_away_and_goes_on_when_it_is_back() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        metrics_address = f"127.0.0.1:{taken.getsockname()[1]}"
    arguments = ("--expert", "ffn", "--d-model", "8", "--metrics-listen", metrics_address)
    with ServerProcess(*arguments) as first:
        terminal = Terminal("top", metrics_address, "--interval-s", "0.1", columns=80, lines=24)
        terminal.read_until("experts at")
        first.kill()
        terminal.read_until("away for")
        away_at = len(terminal.written)
    with ServerProcess(*arguments):
        terminal.read_until("calls/s", away_at)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0, terminal.written


def test_a_given_number_of_looks_that_ends_while_the_server_is_away_is_an_error() -> None:
    config = ServingConfig(metrics_listen="127.0.0.1:0")
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=config) as server:
        assert server.metrics_address is not None
        looks = ("--interval-s", "1", "--looks", "3")
        terminal = Terminal("top", server.metrics_address, *looks, columns=80, lines=24)
        terminal.read_until("experts at")
        terminal.process.send_signal(signal.SIGSTOP)
    terminal.process.send_signal(signal.SIGCONT)
    assert terminal.end() == 1
    assert "away for" in terminal.written
    assert "Error: metrics at" in terminal.written


@pytest.mark.parametrize("columns", [60, 40, 20])
def test_a_narrow_terminal_shows_names_and_as_many_columns_as_fit(
    server: ExpertsServer, columns: int
) -> None:
    assert server.metrics_address is not None
    top, info = ["top", server.metrics_address, "--looks", "1"], ["info", server.address]
    for command, term in ((top, "xterm"), (info, "xterm"), (info, "dumb")):
        terminal = Terminal(*command, columns=columns, lines=24, term=term)
        assert terminal.end() == 0
        lines = [line.strip() for line in terminal.lines()]
        assert max(map(len, lines)) <= columns
        assert "too narrow for:" in " ".join(lines)
        assert any(line.split()[0] == "ffn.0" for line in lines if line), lines


@pytest.mark.parametrize(
    ("columns", "lines", "expected"),
    [
        (80, 24, (1, 19, 1)),
        (80, 5, (1, 1, 0)),
        (80, 4, (0, 1, 0)),
        (60, 10, (1, 5, 1)),
        (40, 12, (1, 6, 2)),
        (20, 5, (0, 1, 0)),
        (20, 16, (3, 1, 9)),
        (20, 15, (3, 1, 0)),
    ],
)
def test_a_low_terminal_shows_an_expert_first_and_as_many_as_there_is_room_for(
    columns: int, lines: int, expected: tuple[int, int, int]
) -> None:
    """Lines of the title, of experts and of the caption, however often these are folded."""
    at_first: Totals = {(f"ffn.{index}", "calls"): 0 for index in range(NUM_EXPERTS)}
    make = functools.partial(table_of, "127.0.0.1:31415", Reading(10.0, at_first), Reading(12.0, at_first))
    console = Console(width=columns, height=lines, file=io.StringIO())
    with console.capture() as captured:
        console.print(fit_screen(make, console))
    text = captured.get()
    title, _, rest = text.partition("expert ")
    shown = [line for line in rest.splitlines() if line.startswith("ffn.")]
    caption = rest.partition(shown[-1])[2].splitlines()[1:]
    assert (len(title.splitlines()), len(shown), len(caption)) == expected, text
    assert len(text.splitlines()) <= lines - 1


def test_top_in_a_low_terminal_shows_an_expert(server: ExpertsServer) -> None:
    assert server.metrics_address is not None
    terminal = Terminal("top", server.metrics_address, "--looks", "1", columns=20, lines=5)
    assert terminal.end() == 0
    terminal.written, rewind, _ = terminal.written.partition("\x1b[2K")
    assert rewind, "the first look, which is cut to the screen; the last one is not"
    assert any(re.search(r"^(ffn|….*)\..* 0\.0", line) for line in terminal.lines()), terminal.written


def test_info_shows_whole_names_in_a_terminal_and_in_a_pipe(server: ExpertsServer) -> None:
    piped = run_command("info", server.address).stdout.decode()
    assert re.search(rf"^{re.escape(LONG)} +FeedForwardExpert +\(\*, 8\) float32", piped, re.MULTILINE), piped
    terminal = Terminal("info", server.address, columns=200, lines=60)
    assert terminal.end() == 0
    assert [line.rstrip() for line in terminal.lines() if line.strip()] == [
        line.rstrip() for line in piped.splitlines() if line.strip()
    ]


@pytest.mark.parametrize("columns", [80, 40])
def test_info_shows_whole_names_also_where_they_have_no_room_on_one_line(columns: int) -> None:
    names = [f"encoder.layers.{index}.mlp.experts.7" for index in (1, 11)]
    with ExpertsServer({name: FeedForwardExpert(D) for name in names}) as server:
        terminal = Terminal("info", server.address, columns=columns, lines=24)
        assert terminal.end() == 0
    first_column = "".join(line.split(" ")[0] for line in terminal.lines() if not line.startswith(" "))
    assert "".join(names) in first_column, terminal.written


def shown(before: Totals, now: Totals, max_rows: int | None = None) -> list[list[str]]:
    """Return the rows of the table of what happened in two seconds."""
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table_of("here", Reading(10.0, before), Reading(12.0, now), max_rows))
    return [line.split() for line in captured.get().splitlines()[3:]]


@pytest.mark.parametrize("address", ["[::1]:9100", "[fd00::1]:9100", "[fe80:a:b::1]:9100"])
def test_addresses_and_names_are_shown_as_they_are(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever rich would make of them, which reads `[fd00::1]` as markup and `:a:` as an emoji."""
    name = "[bold]e:a:[/]"
    info = pb.ExpertInfo(name=name, kind="[red]Linear", optimizer=":a:")
    print_table(address, pb.InfoReply(server_version="0.1.0", experts=[info]))
    Console(width=200).print(table_of(address, Reading(0.0), Reading(2.0, totals(name, calls=1))))
    title, _, _, row, title_of_top, _, _, row_of_top = capsys.readouterr().out.splitlines()
    assert title.strip() == f"1 expert at {address} (version 0.1.0)"
    assert row.split()[:2] == [name, "[red]Linear"]
    assert " :a: " in row
    assert title_of_top.strip() == f"experts at {address}, last 2.0 s"
    assert row_of_top.split()[0] == name


def totals(expert: str, **numbers: float) -> Totals:
    return {(expert, what): number for what, number in numbers.items()}


def test_a_row_says_what_was_added_between_two_looks() -> None:
    before = totals("e", calls=10, tokens=100, compute_s=1, batches=5, queue_s=1, failed=1, updates=2)
    now = totals(
        "e", calls=30, tokens=500, compute_s=1.5, batches=15, queue_s=3, failed=2, updates=3, waiting=4
    )
    assert shown(before, now) == [["e", "10.0", "200", "25", "100.00", "50.00", "4", "2", "3"]]


def test_a_server_that_was_started_anew_begins_at_zero() -> None:
    assert shown(totals("e", calls=1000, tokens=9), totals("e", calls=4, tokens=8))[0][:3] == [
        "e",
        "2.0",
        "4",
    ]


def test_names_that_do_not_fit_show_their_ends() -> None:
    names = [f"layer.17.of-a-very-deep-model.ffn.{index}" for index in range(4)]
    at_first: Totals = {(name, "calls"): 0 for name in names}
    console = Console(width=60, file=io.StringIO())
    table = fit(table_of("here", Reading(10.0, at_first), Reading(12.0, at_first), 3), console.width)
    with console.capture() as captured:
        console.print(table)
    *_, first, second, third, caption = captured.get().splitlines()
    assert [row.split()[0][-6:] for row in (first, second, third)] == [".ffn.0", ".ffn.1", ".ffn.2"]
    assert first.startswith("…")
    assert len(first) <= 60
    assert caption.strip() == "the busiest 3 of 4; too narrow for: waiting, failed, updates"


def test_where_not_all_fit_the_busiest_are_shown_in_the_order_of_their_names() -> None:
    before: Totals = {(f"e.{index}", "calls"): 0 for index in range(12)}
    now = before | {("e.10", "compute_s"): 2.0, ("e.9", "compute_s"): 1.0}
    rows = shown(before, now, max_rows=3)
    assert [row[0] for row in rows[:3]] == ["e.0", "e.9", "e.10"]
    assert rows[3] == ["the", "busiest", "3", "of", "12"]
