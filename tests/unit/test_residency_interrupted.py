"""A handler of Ctrl-C that uses parts while its own thread waits for some, or reads them."""

from __future__ import annotations

import pytest

from tests.support.subprocesses import assert_prints

PREAMBLE = """
    import signal
    import torch
    from moe_autograd._interrupts import uninterrupted
    from moe_autograd.autograd.offload.residency import Residency
    from tests.support.stores import WatchedStore, part_of, put_all_out

    def interrupt():
        signal.raise_signal(signal.SIGINT)

    def run(waits):
        with uninterrupted():
            interrupt()  # is heard when `waits` first looks up
            waits()

    def hold(part):
        with residency.hold([part]):
            print("held", part.name)

    store = WatchedStore()
    residency = Residency(300, store, torch.device("cpu"))
    """


@pytest.mark.parametrize(
    ("waits", "told"),
    [("hold(b)", "held bb"), ("residency.discard(a)", ""), ("residency.flush()", "")],
    ids=["for room", "to discard", "to have all written"],
)
def test_a_handler_may_hold_parts_while_its_thread_waits(waits: str, told: str) -> None:
    assert_prints(
        PREAMBLE
        + f"""
    a, b, c = part_of(residency, "a", 200), part_of(residency, "bb", 200), part_of(residency, "ccc", 100)

    def handle(*_):
        with residency.hold([c]):
            print("all wait:", residency.holders.all_wait(residency._lock.num_news))
        hold(a)
        store.gate.set()

    signal.signal(signal.SIGINT, handle)
    with residency.hold([a, c]):
        residency.changed(a)
        store.gate.clear()
    run(lambda: {waits})
    print("over")
    residency.close()
    """,
        f"all wait: False held a {told} over",
        limit_s=60.0,
    )


def test_a_handler_that_looks_up_itself_may_wait_too() -> None:
    """It waits for the same room as its thread, and another Ctrl-C comes meanwhile."""
    assert_prints(
        PREAMBLE
        + """
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)

    def handle(*_):
        signal.signal(signal.SIGINT, lambda *_: store.gate.set())
        run(lambda: hold(b))

    signal.signal(signal.SIGINT, handle)
    with residency.hold([a]):
        residency.changed(a)
        store.gate.clear()
    run(lambda: hold(b))
    print("over")
    residency.close()
    """,
        "held bb held bb over",
        limit_s=60.0,
    )


def test_what_a_handler_raises_while_its_thread_waits_is_raised_there_and_leaves_all_as_it_was() -> None:
    assert_prints(
        PREAMBLE
        + """
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)

    def handle(*_):
        hold(a)
        raise KeyError("handled")

    signal.signal(signal.SIGINT, handle)
    with residency.hold([a]):
        residency.changed(a)
        store.gate.clear()
    try:
        run(lambda: hold(b))
    except KeyError as error:
        print(*error.args)
    store.gate.set()
    hold(b)
    residency.close()
    """,
        "held a handled held bb",
        limit_s=60.0,
    )


def test_a_handler_may_hold_or_flush_what_its_thread_was_reading() -> None:
    """It runs when that is read: only then somebody can have it."""
    assert_prints(
        PREAMBLE
        + """
    a, b = part_of(residency, "a"), part_of(residency, "bb")
    put_all_out(residency)
    read = store.read

    def read_and_interrupt(name, flat):
        interrupt()
        read(name, flat)

    def handle(*_):
        store.read = read
        hold(a)
        hold(b)
        residency.flush()
        print("flushed")

    signal.signal(signal.SIGINT, handle)
    store.read = read_and_interrupt
    with residency.hold([a, b]):
        print("over")
    residency.close()
    """,
        "held a held bb flushed over",
        limit_s=60.0,
    )


def test_python_s_own_handler_does_not_wait_for_a_read() -> None:
    assert_prints(
        PREAMBLE
        + """
    a = part_of(residency, "a")
    put_all_out(residency)
    read = store.read

    def read_and_interrupt(name, flat):
        interrupt()
        print("has read")

    store.read = read_and_interrupt
    try:
        hold(a)
    except KeyboardInterrupt:
        print("interrupted")
    store.read = read
    hold(a)
    residency.close()
    """,
        "interrupted held a",
        limit_s=60.0,
    )


def test_a_handler_that_wants_more_than_fits_beside_what_its_thread_holds_is_told() -> None:
    assert_prints(
        PREAMBLE
        + """
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)

    def handle(*_):
        try:
            hold(b)
        except RuntimeError as error:
            print(str(error).split(" (")[0])

    signal.signal(signal.SIGINT, handle)
    with residency.hold([a]):
        interrupt()
    residency.close()
    """,
        "OffloadedExperts: expected 200 more bytes",
        limit_s=60.0,
    )


def test_another_signal_s_handler_that_comes_as_its_thread_has_the_lock_is_told() -> None:
    assert_prints(
        PREAMBLE
        + """
    a = part_of(residency, "a")
    told = []

    def handle(*_):
        try:
            hold(a)
        except RuntimeError as error:
            told.append(str(error))
        residency.lose_passing(lost.pop())  # waits for nobody

    signal.signal(signal.SIGTERM, handle)
    lost = [residency.add_passing(a.layout) for _ in range(2)]
    with residency._lock:
        signal.raise_signal(signal.SIGTERM)
        residency._lock.wait(0.0)
        signal.raise_signal(signal.SIGTERM)
    print(*[text.split(" that uses")[0] for text in told])
    hold(a)
    residency.close()
    """,
        2 * "OffloadedExperts: expected a signal's handler, or a finalizer, " + "held a",
        limit_s=60.0,
    )
