"""The timeline records what is reported while it is open, from any thread, and exports it."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_autograd.timeline import Span, add_span, is_recording, record_timeline
from tests.support.subprocesses import assert_prints


def test_nothing_is_recorded_outside_of_a_recording() -> None:
    assert not is_recording()
    add_span("ffn.0", "forward", 0.0, 1.0)
    with record_timeline() as timeline:
        assert is_recording()
    add_span("ffn.0", "forward", 0.0, 1.0)
    assert timeline.spans == []
    assert not is_recording()


def test_a_recording_as_a_dictionary_has_its_calls_and_nothing_else() -> None:
    with record_timeline() as timeline:
        add_span("a", "forward", 0.0, 1.0)
    spans = [{"name": "a", "phase": "forward", "start_s": 0.0, "end_s": 1.0}]
    assert asdict(timeline) == {"spans": spans}


def test_overlapping_recordings_each_get_what_ends_while_they_are_open() -> None:
    with record_timeline() as outer:
        add_span("a", "forward", 0.0, 1.0)
        with record_timeline() as inner:
            add_span("b", "backward", 1.0, 2.0)
    assert inner.spans == [Span("b", "backward", 1.0, 2.0)]
    assert outer.spans == [Span("a", "forward", 0.0, 1.0), Span("b", "backward", 1.0, 2.0)]


def test_calls_of_all_threads_are_recorded_none_lost() -> None:
    def report(name: str) -> None:
        for index in range(1000):
            add_span(name, "forward", index, index + 1)

    with record_timeline() as timeline:
        threads = [threading.Thread(target=report, args=(f"ffn.{index}",)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(timeline.spans) == 4000


def test_a_recording_ends_with_its_block_also_when_that_raises() -> None:
    try:
        with record_timeline():
            raise KeyError("a user's own")
    except KeyError:
        pass
    assert not is_recording()


def test_a_block_that_was_left_may_be_collected_wherever_another_begins_or_ends() -> None:
    program = """
        import gc
        from moe_autograd.timeline import is_recording, record_timeline

        def watch():
            with record_timeline() as timeline:
                yield timeline

        class Holder:
            pass

        def leave():
            holder = Holder()
            holder.own, holder.watching = holder, watch()
            next(holder.watching)

        gc.freeze()
        gc.disable()
        for allocation in range(1, 60):
            leave()
            gc.set_threshold(gc.get_count()[0] + allocation)
            gc.enable()
            with record_timeline():
                pass
            gc.disable()
            gc.collect()
            assert not is_recording(), allocation
        """
    assert_prints(program, "", limit_s=60)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_with_what_its_own_thread_records() -> None:
    """A recording of another thread's had no end there."""
    records, is_over = threading.Event(), threading.Event()

    def record() -> None:
        with record_timeline():
            records.set()
            is_over.wait()

    thread = threading.Thread(target=record)
    thread.start()
    records.wait()
    with record_timeline() as own:
        child = os.fork()
        if not child:
            add_span("ffn.0", "forward", 1.0, 1.5)
            is_own = is_recording() and len(own.spans) == 1
        else:
            is_over.set()
            thread.join()
    if not child:
        os._exit(3 if is_own and not is_recording() else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert own.spans == []


def test_the_chrome_trace_has_one_named_lane_an_expert_and_microseconds(tmp_path: Path) -> None:
    with record_timeline() as timeline:
        add_span("ffn.1", "forward", 10.0, 10.002)
        add_span("ffn.0", "backward", 10.001, 10.0035)
    timeline.save_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    spans = {event["tid"]: event for event in events if event["ph"] == "X"}
    assert lanes.keys() == {"ffn.0", "ffn.1"}
    assert (spans[lanes["ffn.1"]]["name"], spans[lanes["ffn.1"]]["ts"], spans[lanes["ffn.1"]]["dur"]) == (
        "forward",
        0.0,
        2000.0,
    )
    assert (spans[lanes["ffn.0"]]["name"], spans[lanes["ffn.0"]]["ts"]) == ("backward", 1000.0)


def test_lanes_are_in_the_order_of_numbers() -> None:
    with record_timeline() as timeline:
        for name in ("ffn.10", "expert 3", "ffn.2", "ffn"):
            add_span(name, "forward", 1.0, 2.0)
    lanes = [event for event in timeline.chrome_trace()["traceEvents"] if event["ph"] == "M"]
    assert [lane["args"]["name"] for lane in lanes] == ["expert 3", "ffn", "ffn.2", "ffn.10"]


def test_an_empty_recording_exports_an_empty_trace(tmp_path: Path) -> None:
    with record_timeline() as timeline:
        pass
    assert timeline.chrome_trace()["traceEvents"] == []
