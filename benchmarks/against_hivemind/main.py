"""The same experts, hosted and called by hivemind and by us, on one machine, in turns.

hivemind wants versions of its own, so it runs in an interpreter of its own, which has to be told::

    python3.11 -m venv hivemind-venv && hivemind-venv/bin/pip install hivemind==1.1.12 torch==2.13.0
    python -m benchmarks.against_hivemind.main --hivemind hivemind-venv/bin/python
    python -m benchmarks.against_hivemind.main --without-hivemind
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from benchmarks.against_hivemind.asking_hivemind import peer
from benchmarks.against_hivemind.workloads import WORKLOADS, Workload
from benchmarks.measure import print_table, stopwatch, take_turns
from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect

VARIABLE = "HIVEMIND_PYTHON"
IN_A_ROW = 6
REST_S = 0.02  # threads of OpenMP spin for some 5 ms after their last operator, on the other side's cores


# ---- experts


class FeedForward(nn.Module):
    """What hivemind calls "ffn": with a residual connection and a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.norm(x + self.down(0.5 * h * (1 + torch.tanh(h * 0.7978845608 * (1 + 0.044715 * h * h)))))


def make_experts(workload: Workload) -> dict[str, nn.Module]:
    names = [f"expert.{index}" for index in range(workload.num_experts)]
    return {name: nn.Identity() if workload.kind == "echo" else FeedForward(workload.width) for name in names}


def adam_of(workload: Workload) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return functools.partial(torch.optim.Adam, lr=1e-3, fused=workload.is_fused or None)


def serve(name: str) -> None:
    workload = WORKLOADS[name]
    optimizer = None if workload.kind == "echo" else adam_of(workload)
    with ExpertsServer(make_experts(workload), optimizer=optimizer, update=workload.update) as server:
        print(server.address, flush=True)
        sys.stdin.read()


def start(*arguments: str) -> subprocess.Popen[str]:
    """Run a part of this benchmark in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.against_hivemind.main", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(
            f"against_hivemind: expected a line of a process of ours, got its end ({process.wait()})."
        )
    return line.strip()


@contextmanager
def serving(name: str) -> Iterator[str]:
    """Run our server in a process of its own; its address."""
    with start("--serve", name) as process:
        try:
            yield line_of(process)
        finally:
            process.communicate("")


# ---- clients in processes of their own


def be_client(name: str, client: int, address: str) -> None:
    """Call experts whenever told to, as hivemind's `benchmark_throughput` does."""
    workload = WORKLOADS[name]
    torch.set_num_threads(1)
    with connect(address, timeout_s=120.0) as experts:
        modules = list(experts.values())
        x = torch.randn(workload.num_rows, workload.width, requires_grad=workload.wants_input_grads)
        print("ready", flush=True)
        for turn in sys.stdin:
            for index in workload.chosen_experts(client, int(turn)):
                modules[index](x).sum().backward()
            print("done", flush=True)


@contextmanager
def clients_calling(name: str, address: str) -> Iterator[Callable[[], object]]:
    """Start the clients; yield what lets all of them call at once, until the last is done."""
    workload, turns = WORKLOADS[name], itertools.count()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(start("--serve", name, "--client", str(client), address))
            for client in range(workload.num_clients)
        ]

        def all_say(word: str) -> None:
            for client in clients:
                assert (said := line_of(client)) == word, said

        def turn() -> None:
            number = next(turns)
            for client in clients:
                assert client.stdin is not None
                client.stdin.write(f"{number}\n")
                client.stdin.flush()
            all_say("done")

        all_say("ready")
        yield turn


def clients_turn(workload: Workload, experts: dict[str, nn.Module]) -> Callable[[], object]:
    """The same calls in a plain loop, without processes and network."""
    modules = list(experts.values())
    optimizers = [adam_of(workload)(module.parameters()) for module in modules]
    x = torch.randn(workload.num_rows, workload.width, requires_grad=workload.wants_input_grads)
    turns = itertools.count()

    def turn() -> None:
        number = next(turns)
        calls = [workload.chosen_experts(client, number) for client in range(workload.num_clients)]
        for index in itertools.chain(*zip(*calls, strict=True)):
            modules[index](x).sum().backward()
            optimizers[index].step()
            optimizers[index].zero_grad()

    return turn


# ---- turns


def layer_turn(workload: Workload, experts: RemoteExperts | dict[str, nn.Module]) -> Callable[[], object]:
    """One training step of a layer, over a server or in this process."""
    layer = MixtureOfExperts(TopKRouter(workload.width, workload.num_experts, workload.top_k), experts)
    optimizers: list[torch.optim.Optimizer | RemoteOptimizer] = [adam_of(workload)(layer.parameters())]
    if isinstance(experts, RemoteExperts) and workload.update == "on_step":
        optimizers.append(RemoteOptimizer(experts))
    x = torch.randn(workload.num_rows, workload.width)

    def turn() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        layer(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return turn


def experts_turn(workload: Workload, experts: RemoteExperts | dict[str, nn.Module]) -> Callable[[], object]:
    """Forward and backward of every expert; the weights are updated by each backward, here by Adam."""
    modules = list(experts.values())
    x = torch.randn(workload.num_rows, workload.width)
    is_remote = isinstance(experts, RemoteExperts)
    optimizer = None if is_remote else adam_of(workload)(nn.ModuleList(modules).parameters())

    def turn() -> None:
        inputs = [(x.clone().requires_grad_(),) for _ in modules]
        outputs = parallel_apply(modules, inputs)
        torch.autograd.backward([output.sum() for output in outputs])
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return turn


def echo_turn(workload: Workload, experts: RemoteExperts | dict[str, nn.Module]) -> Callable[[], object]:
    (expert,) = experts.values()
    x = torch.randn(workload.num_rows, workload.width)

    def turn() -> None:
        with torch.no_grad():
            expert(x)

    return turn


TURNS = {"layer": layer_turn, "experts": experts_turn, "echo": echo_turn}


@contextmanager
def ours(name: str) -> Iterator[Callable[[], object]]:
    """Serve the experts and yield a turn of their clients."""
    workload = WORKLOADS[name]
    with serving(name) as address:
        if workload.kind == "clients":
            with clients_calling(name, address) as turn:
                yield turn
        else:
            with connect(address, timeout_s=120.0) as experts:
                yield TURNS[workload.kind](workload, experts)


def be_alone(name: str) -> None:
    """Do the same in this one process, whenever told to."""
    workload = WORKLOADS[name]
    experts = make_experts(workload)
    turns = {**TURNS, "clients": clients_turn}
    turn = turns[workload.kind](workload, experts)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(stopwatch(turn), flush=True)


@contextmanager
def in_one_process(name: str) -> Iterator[Callable[[], dict[str, float]]]:
    """Start the one process, apart from our client: threads of torch spin for a while after they worked."""
    with start("--serve", name, "--alone") as process:
        assert line_of(process) == "ready"

        def turn() -> dict[str, float]:
            assert process.stdin is not None
            process.stdin.write("turn\n")
            process.stdin.flush()
            return {"s": float(line_of(process))}

        try:
            yield turn
        finally:
            process.communicate("")


def compare(name: str, python: str, rounds: int) -> list[object]:
    """Return a row of the table."""
    with peer(python, name) as hivemind, ours(name) as remote, in_one_process(name) as local:
        times = take_turns(
            {
                "ours": lambda: {"s": stopwatch(remote)},
                "hivemind": hivemind.turn,
                "in one process": local,
            },
            rounds=rounds,
            warmup=1,
        )
        num_processes = hivemind.num_processes
    us, theirs, here = (times[who]["s"] for who in ("ours", "hivemind", "in one process"))
    num_samples = WORKLOADS[name].num_samples
    return [
        name,
        *(round(who.median_ms, 1) for who in (us, theirs, here)),
        round(num_samples / us.median_ms * 1e3) if num_samples else "",
        theirs.ratio_to(us),
        here.ratio_to(us),
        num_processes,
    ]


def compare_alone(name: str, rounds: int) -> list[object]:
    """Return a row of the table where hivemind's processes are not beside: several times in a row, after a rest."""

    def several(turn: Callable[[], float]) -> dict[str, float]:
        time.sleep(REST_S)
        return {"s": sum(turn() for _ in range(IN_A_ROW)) / IN_A_ROW}

    with ours(name) as remote, in_one_process(name) as local:
        times = take_turns(
            {
                "ours": lambda: several(lambda: stopwatch(remote)),
                "in one process": lambda: several(lambda: local()["s"]),
            },
            rounds=rounds,
        )
    us, here = times["ours"]["s"], times["in one process"]["s"]
    return [name, round(us.median_ms, 1), round(here.median_ms, 1), us.ratio_to(here), here.ratio_to(us)]


def main_alone(rounds: int, names: list[str]) -> None:
    heads = ("workload", "ours, ms", "in one process, ms", "times its time", "of its speed")
    print_table(heads, [compare_alone(name, rounds) for name in names])


def main(python: str, rounds: int, names: list[str]) -> None:
    heads = (
        "workload",
        "ours, ms",
        "hivemind, ms",
        "in one process, ms",
        "ours, samples/s",
        "times hivemind's speed",
        "of one process's speed",
        "hivemind's processes",
    )
    rows = []
    for name in names:
        rows.append(compare(name, python, rounds))
        print_table(heads, rows[-1:])
    print_table(heads, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hivemind", default=os.environ.get(VARIABLE), help="its interpreter's path")
    parser.add_argument(
        "--without-hivemind", action="store_true", help="us and the one process, and nobody beside"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="may be given several times")
    parser.add_argument("--serve", choices=WORKLOADS, help="be our server")
    parser.add_argument("--alone", action="store_true", help="with --serve: do it all in this process")
    parser.add_argument(
        "--client", nargs=2, metavar=("NUMBER", "ADDRESS"), help="with --serve: be a client of it"
    )
    arguments = parser.parse_args()
    if arguments.client:
        be_client(arguments.serve, int(arguments.client[0]), arguments.client[1])
    elif arguments.alone:
        be_alone(arguments.serve)
    elif arguments.serve:
        serve(arguments.serve)
    elif arguments.without_hivemind:
        main_alone(arguments.rounds, arguments.only or ["step", "4 clients"])
    elif arguments.hivemind is None:
        print(
            f"against_hivemind: NOT RUN: expected --hivemind PYTHON or {VARIABLE}, the path of an interpreter with "
            "hivemind 1.1.12, got neither.\nMake one: "
            "python3.11 -m venv hivemind-venv && hivemind-venv/bin/pip install hivemind==1.1.12 torch==2.13.0"
        )
    else:
        main(arguments.hivemind, arguments.rounds, arguments.only or list(WORKLOADS))
