"""What is promised in seconds: a server that is lost in the middle of a step is noticed within two, and one that is
back serves again within two.

A machine that others use, too, may let nobody run who could notice, for longer than the tenth of a second that there
is to spare. So each promise has to be kept in one of three attempts. A client that breaks it by its own doing breaks it
in each: the signal in a forward comes when the server has just been heard of, so that the next ping is a second away;
and the server stays away for so long that pauses between attempts to connect, if they grew on, were too long by then.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_autograd.errors import ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.servers import START_S, ServerProcess, WireClient, wait_until

PROMISED_S, NUM_ATTEMPTS = 2.0, 3
AWAY_S = 4.5
PHASES, FATES = ["forward", "backward", "step"], ["killed", "frozen"]
AT_ONCE, PATIENT = RetryPolicy(patience_s=0.0), RetryPolicy(patience_s=START_S)

CONFIG = """
listen = "{address}"
checkpoint_dir = {checkpoints}
optimizer = {{ name = "sgd", lr = 0.1 }}
experts.e = {{ class = "tests.support.held:HeldElsewhere", args = {{ phase = "{phase}", folder = {folder} }} }}
"""


class Place:
    """A server process with an expert that is held in its forward or backward; it can be lost, and come back.

    Args:
        folder: of its files, empty.
        phase: where the expert is held; it does not know "step", so there nothing holds it.
        fate: "killed", or "frozen".
    """

    def __init__(self, folder: Path, phase: str, fate: str) -> None:
        self._folder, self._file = folder, folder / "server.toml"
        self._phase, self._fate = phase, fate
        self._server = ServerProcess("--config", str(self._file))

    def __enter__(self) -> Place:
        self._start("127.0.0.1:0")
        self.address = self._server.address
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def _start(self, address: str) -> None:
        folder, checkpoints = json.dumps(str(self._folder)), json.dumps(str(self._folder / "checkpoints"))
        self._file.write_text(
            CONFIG.format(address=address, phase=self._phase, folder=folder, checkpoints=checkpoints)
        )
        self._server.start()

    def wait_until_held(self) -> None:
        wait_until((self._folder / "begun").exists)

    def save(self) -> None:
        with WireClient(self.address) as client:
            client.save()

    def lose(self) -> float:
        """Return when it was lost."""
        lost_at = time.monotonic()
        if self._fate == "frozen":
            self._server.signal(signal.SIGSTOP)
        else:
            self._server.kill()
        return lost_at

    def give_back(self) -> float:
        """Let the expert go, too; return when the server was back."""
        (self._folder / "go").touch()
        if self._fate == "frozen":
            self._server.signal(signal.SIGCONT)
        else:
            self._start(self.address)
        return time.monotonic()


class Step(threading.Thread):
    """A training step; knows when it ended, and with which error.

    Args:
        experts: one.
        before_update: called between the backward and the update.
    """

    def __init__(self, experts: RemoteExperts, before_update: Callable[[], object]) -> None:
        super().__init__()
        self._experts = experts
        self._before_update = before_update
        self.error: BaseException | None = None
        self.ended_at = 0.0

    def run(self) -> None:
        try:
            self._experts["e"](torch.ones(1, 4)).sum().backward()
            self._before_update()
            RemoteOptimizer(self._experts).step()
        except BaseException as error:
            self.error = error
        self.ended_at = time.monotonic()


def begin_step_and_lose(place: Place, experts: RemoteExperts, phase: str) -> tuple[Step, float]:
    """Return a step that is under way on a server that is lost, and when it was."""
    lost_at: list[float] = []

    def lose() -> None:
        lost_at.append(place.lose())

    def before_update() -> None:
        if phase == "step":
            place.save()  # gradients that no checkpoint has go with the server, which is an error of its own
            lose()

    step = Step(experts, before_update)
    step.start()
    if phase != "step":
        place.wait_until_held()
        lose()
    wait_until(lambda: bool(lost_at))
    return step, lost_at[0]


def noticed_after_s(place: Place, phase: str) -> float:
    with connect(place.address, timeout_s=START_S, retry=AT_ONCE) as experts:
        step, lost_at = begin_step_and_lose(place, experts, phase)
        step.join(START_S)
        assert isinstance(step.error, ServerUnavailableError)
        return step.ended_at - lost_at


def served_again_after_s(place: Place, phase: str) -> float:
    with connect(place.address, timeout_s=2 * START_S, retry=PATIENT) as experts:
        step, _ = begin_step_and_lose(place, experts, phase)
        step.join(AWAY_S)
        assert step.is_alive(), f"it did not wait for the server, but {step.error!r}"
        back_at = place.give_back()
        step.join(START_S)
        if step.error is not None:
            raise step.error
        assert experts.info()["e"].num_updates == 1
        return step.ended_at - back_at


@pytest.fixture
def shown_in_time(
    tmp_path: Path,
) -> Callable[[Callable[[Place, str], float], str, str], None]:
    """Assert that one of the attempts is in time, each at a place of its own."""

    def shown(measure: Callable[[Place, str], float], fate: str, phase: str) -> None:
        taken_s: list[float] = []
        while len(taken_s) < NUM_ATTEMPTS and min(taken_s, default=PROMISED_S) >= PROMISED_S:
            folder = tmp_path / str(len(taken_s))
            folder.mkdir()
            with Place(folder, phase, fate) as place:
                taken_s.append(measure(place, phase))
        assert min(taken_s) < PROMISED_S, f"took {taken_s} s"

    return shown


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fate", FATES)
def test_a_server_that_is_lost_in_mid_step_is_noticed_within_two_seconds(shown_in_time, fate, phase):
    shown_in_time(noticed_after_s, fate, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fate", FATES)
def test_a_step_that_waits_for_a_server_goes_on_within_two_seconds_of_its_return(shown_in_time, fate, phase):
    shown_in_time(served_again_after_s, fate, phase)
