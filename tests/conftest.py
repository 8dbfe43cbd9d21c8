"""Options of the whole suite."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Tests run in several processes on the same cores. There a thread of an intra-op team that spins while it waits, as
# libgomp's do, keeps a core from the others: ten times the time on a crowded machine. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from moe_autograd.autograd import in_turn

# The same examples on every run, however busy the machine is: a failure is then the change's own, and can be repeated.
# To search on, `pytest --hypothesis-profile search`.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _UNTIMED, derandomize=True)
settings.register_profile("search", _UNTIMED, max_examples=1000)
settings.load_profile("same")

_num_modules = 0  # at the last search for garbage in them


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make soak` say how long it has, and `make races` how often threads take turns."""
    parser.addoption("--soak-minutes", type=float, default=0.35, help="how long the soak tests run")
    parser.addoption(
        "--switch-interval", type=float, help="s after which another thread goes on; shows races"
    )


@pytest.fixture
def is_full_size(request: pytest.FixtureRequest) -> bool:
    """Whether a test of the soak has the time for its full size; `make soak` says so."""
    minutes: float = request.config.getoption("--soak-minutes")
    return minutes >= 10


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What goes, goes without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the map's own machinery, for which no call is too small then."""
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same numbers whichever tests came before it in its process."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)  # the former takes a millisecond, of which the GPUs that are not there take most
    random.seed(0)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A test that left Ctrl-C to the system would have a later one, which sends it to itself, end all of them."""
    before = signal.getsignal(signal.SIGINT)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is before, f"expected {before} for SIGINT, got {left}"


@pytest.fixture(autouse=True, scope="session")
def no_lingering() -> Iterator[None]:
    """A server that stops need not wait for late callers: it is 0.2 s, a thousand times.

    Those in processes of their own wait as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experts_server.serving.doorway.LINGER_S", 0.0)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Switch threads as often as asked, and hear Ctrl-C.

    A shell tells its background jobs to ignore that, and our children would inherit it.
    """
    interval_s: float | None = config.getoption("--switch-interval")
    if interval_s is not None:
        sys.setswitchinterval(interval_s)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage until all tests are found: nothing goes by then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup() -> None:
    """Search for garbage only in what tests make: modules and all tests take half a second, thousands of times.

    Some of torch's are imported late.
    """
    global _num_modules
    if len(sys.modules) > _num_modules:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()
