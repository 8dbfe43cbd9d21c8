"""Which server hosts which expert, which of them are left alone, and where an expert has moved to."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock, patch

import pytest

from moe_autograd.remote.finding import Finding
from moe_autograd.remote.placement import HostedExpert, Placement
from moe_autograd.remote.servers import Servers
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import mark_of


def reply(*names: str, replica: int = 0, is_trained: bool = False) -> pb.InfoReply:
    experts = [
        pb.ExpertInfo(name=name, kind="Linear", replica=replica, is_trained=is_trained) for name in names
    ]
    return pb.InfoReply(experts=experts)


class TestPlacement:
    def make(self, seed: int = 0, **hosted: tuple[str, ...]) -> Placement:
        """Servers by address with the names of what they host."""
        placement = Placement(seed)
        placement.note_replies(hosted, {address: reply(*names) for address, names in hosted.items()})
        return placement

    def test_a_client_always_chooses_the_same_replica_and_others_choose_others(self):
        first_choices = set()
        for seed in range(10):
            placement = self.make(seed, a=("ffn.0",), b=("ffn.0",), c=("ffn.0",))
            assert placement.hosts_of("ffn.0") == placement.hosts_of("ffn.0")
            first_choices.add(placement.hosts_of("ffn.0")[0])
        assert first_choices == set("abc")

    @pytest.mark.parametrize("seed", range(4))
    def test_a_client_stays_with_its_replica_when_others_join(self, seed):
        placement = self.make(seed, b=("ffn.0",))
        assert placement.hosts_of("ffn.0") == ("b",)
        placement.note_replies("abcd", {address: reply("ffn.0") for address in "acd"})
        assert placement.hosts_of("ffn.0")[0] == "b"

    @pytest.mark.parametrize("seed", range(4))
    def test_a_client_goes_on_where_the_expert_of_its_replica_has_moved_though_that_is_forgotten(self, seed):
        placement = self.make(seed, a=("ffn.0",), b=("ffn.0",))
        (other,) = {"a", "b"} - {placement.home_of("ffn.0")}
        placement.note_replies([other, "c"], {other: reply("ffn.0"), "c": reply("ffn.0")})
        assert placement.home_of("ffn.0") == placement.hosts_of("ffn.0")[0] == "c"

    def test_a_server_that_failed_comes_last_until_it_answers(self):
        placement = self.make(a=("ffn.0",), b=("ffn.0",))
        assert placement.hosts_of("ffn.0") == ("a", "b")
        placement.note_failure("a")
        assert placement.hosts_of("ffn.0") == ("b", "a")
        assert placement.is_lost("a")
        assert "resting: ['a']" in repr(placement)
        placement.note_success("a")
        assert not placement.is_lost("a")
        assert placement.hosts_of("ffn.0") == ("a", "b")

    def test_the_weights_that_are_trained_are_at_a_server_that_failed_unless_the_expert_has_moved(self):
        placement = self.make(a=("ffn.0",), b=("ffn.0",), c=())
        placement.note_failure("a")
        assert (placement.hosts_of("ffn.0"), placement.home_of("ffn.0")) == (("b", "a"), "a")
        placement.note_replies("abc", {"b": reply("ffn.0"), "c": reply("ffn.0")})
        assert placement.home_of("ffn.0") == "c"
        placement.note_replies("abc", {"a": reply("ffn.0"), "b": reply("ffn.0")})
        placement.note_success("a")
        assert placement.home_of("ffn.0") == "a"
        placement.note_failure("b")
        assert placement.home_of("ffn.0") == "a"

    def test_one_that_fails_again_comes_last_for_twice_as_long_up_to_half_a_minute(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        placement, lengths = self.make(a=("ffn.0",), b=("ffn.0",)), []
        for _ in range(9):
            for _ in range(3):  # in one rest they count once
                placement.note_failure("a")
            began_at = now[0]
            while placement.hosts_of("ffn.0") != ("a", "b") and now[0] < began_at + 60:
                now[0] += 0.125
            lengths.append(now[0] - began_at)
        assert lengths == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]

    def test_a_servers_last_word_counts(self):
        placement = self.make(a=("ffn.0",), b=())
        placement.note_replies("ab", {"a": reply()})
        placement.note_replies("ab", {"b": reply("ffn.0")})
        assert placement.hosts_of("ffn.0") == ("b",)
        assert placement.experts()["ffn.0"].addresses == ("b",)

    def test_one_that_does_not_answer_keeps_its_place_as_long_as_it_is_known(self):
        placement = self.make(a=("ffn.0",), b=("ffn.0",))
        placement.note_replies("ab", {"b": reply("ffn.0")})
        assert placement.hosts_of("ffn.0") == ("a", "b")
        assert placement.experts()["ffn.0"].addresses == ("b", "a"), "b answered"
        placement.note_replies("b", {"b": reply("ffn.0")})
        assert placement.hosts_of("ffn.0") == ("b",)

    def test_of_now_is_an_expert_that_one_of_its_servers_has_just_told_of(self):
        placement = self.make(a=("ffn.0", "ffn.1"), b=("ffn.0",))
        placement.note_replies("ab", {"b": reply("ffn.0")})
        assert list(placement.experts(as_of_now=True)) == ["ffn.0"]

    def test_an_expert_may_draw_that_does_so_on_one_of_its_servers(self):
        for who in "ab":
            placement, replies = Placement(seed=0), {address: reply("ffn.0") for address in "ab"}
            replies[who].experts[0].may_draw = True
            placement.note_replies("ab", replies)
            assert placement.experts()["ffn.0"].may_draw

    def test_an_expert_has_moved_to_where_it_was_not_before(self):
        placement = self.make(a=("ffn.0",), b=())
        assert placement.moved_to("ffn.0", "a") == ()
        placement.note_replies("ab", {"b": reply("ffn.0")})
        assert placement.moved_to("ffn.0", "a") == ("b",)
        assert placement.moved_to("ffn.0", "b") == (), "nobody answers at a"

    def test_it_may_move_back_to_a_server_that_was_gone(self):
        placement = self.make(a=("ffn.0",), b=())
        placement.note_replies("ab", {"b": reply("ffn.0")})
        placement.note_replies("ab", {"a": reply("ffn.0")})
        assert placement.moved_to("ffn.0", "b") == ("a",)

    def test_an_expert_does_not_move_to_its_replica(self):
        placement = self.make(a=("ffn.0",), b=("ffn.0",), c=())
        placement.note_replies("abc", {"b": reply("ffn.0")})
        assert placement.moved_to("ffn.0", "a") == placement.now_at("ffn.0", "a") == ()
        placement.note_replies("abc", {"a": reply(), "b": reply("ffn.0")})
        assert (placement.moved_to("ffn.0", "a"), placement.now_at("ffn.0", "a")) == ((), ("b",))
        placement.note_replies("abc", {"b": reply("ffn.0"), "c": reply("ffn.0")})
        assert placement.moved_to("ffn.0", "a") == ("c",)

    @pytest.mark.parametrize(("up_for_s", "has_moved"), [(5.0, False), (3.0, True), (0.0, True)])
    def test_one_that_was_up_when_the_lost_server_answered_last_is_a_replica(
        self, monkeypatch, up_for_s, has_moved
    ):
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        placement = self.make(a=("ffn.0", "ffn.1"), b=())
        now[0] += 10.0
        placement.note_success("a")
        now[0] += 4.0
        placement.note_failure("a")
        for _ in range(2):
            placement.note_up("b", up_for_s)
            assert placement.missed_home_of("ffn.0", "b") == ("" if has_moved else "a")
            placement.note_replies("ab", {"b": reply("ffn.0")})
            assert placement.moved_to("ffn.0", "a") == (("b",) if has_moved else ())
            assert placement.home_of("ffn.0") == ("b" if has_moved else "a")
            now[0], up_for_s = now[0] + 1.0, up_for_s and up_for_s + 1.0
        placement.note_up("c", 1.0)
        placement.note_replies("abc", {"c": reply("ffn.0", "ffn.1")})
        assert (placement.moved_to("ffn.0", "a"), placement.moved_to("ffn.1", "a")) == (("c",), ("c",))

    @pytest.mark.parametrize("is_trained", [True, False])
    def test_of_a_trained_expert_counts_what_its_home_says_though_that_is_away(self, is_trained):
        placement = Placement(seed=0)
        replies = {"a": reply("ffn.0", is_trained=is_trained), "b": reply("ffn.0", is_trained=not is_trained)}
        placement.note_replies("ab", replies)
        assert placement.home_of("ffn.0") == "a"
        placement.note_failure("a")
        placement.note_replies("ab", {"b": replies["b"]})
        hosted = placement.experts()["ffn.0"]
        assert (hosted.is_trained, hosted.addresses) == (is_trained, ("b", "a"))
        assert placement.experts(as_of_now=True)["ffn.0"].is_trained is not is_trained

    def test_where_it_has_moved_may_be_asked_while_another_thread_is_told_that_it_is_there_no_longer(self):
        placement = self.make(a=("ffn.0",), b=("ffn.0",))
        assert placement.hosts_of("ffn.0") == ("a", "b")

        class Lock:
            def __enter__(self) -> None:
                placement._lock = threading.Lock()
                placement.note_replies("ab", {"a": reply(), "b": reply()})

            def __exit__(self, *_: object) -> None: ...

        placement._lock = Lock()
        assert placement.moved_to("ffn.0", "a") == ()

    def test_a_replica_that_once_did_not_answer_in_time_is_one_still(self):
        placement = self.make(a=("ffn.0",), b=("ffn.0",))
        placement.note_replies("ab", {"a": reply("ffn.0")})
        placement.note_replies("ab", {"b": reply("ffn.0")})
        assert placement.moved_to("ffn.0", "a") == ()

    def test_a_replica_that_takes_anothers_place_is_told_from_it(self):
        placement = self.make()
        placement.note_replies("ab", {"a": reply("ffn.0", replica=1), "b": reply("ffn.0", replica=2)})
        assert [placement.replica_of("ffn.0", address) for address in "ab"] == [1, 2]
        placement.note_replies("ab", {"a": reply("ffn.0", replica=2), "b": reply("ffn.0", replica=1)})
        assert placement.moved_to("ffn.0", "a", 1) == ("b",)
        placement.note_replies("ab", {"a": reply("ffn.0", replica=1)})
        assert placement.moved_to("ffn.0", "a", 1) == ("a",)

    def test_of_one_alone_and_of_copies_of_one_checkpoint_nobody_asks_which_it_is(self):
        placement = self.make()
        placement.note_replies("a", {"a": reply("ffn.0", replica=1)})
        assert placement.replica_of("ffn.0", "a") == 0
        placement.note_replies("ab", {"a": reply("ffn.0", replica=1), "b": reply("ffn.0", replica=1)})
        assert placement.replica_of("ffn.0", "a") == 0

    def test_an_expert_is_away_while_nobody_hosts_it_and_fewer_servers_answer_than_once_did(self):
        placement = self.make(a=("ffn.0",), b=("ffn.1",))
        assert not placement.is_away("ffn.0")
        placement.note_replies("ab", {"b": reply("ffn.1")})
        assert [placement.is_away(name) for name in ("ffn.0", "ffn.1")] == [True, False]
        placement.note_replies("ab", {"a": reply(), "b": reply("ffn.1")})
        assert not placement.is_away("ffn.0"), "its server has dropped it"

    def test_a_server_that_was_started_anew_is_a_stranger_until_it_is_asked(self):
        placement = Placement(seed=0)
        for server_id in ("first", "second"):
            placement.note_replies("a", {"a": pb.InfoReply(server_id=server_id)})
            placement.note_answer("a", mark_of(server_id))
            placement.note_answer("a", 0)  # it does not say
            assert not placement.has_strangers
            placement.note_answer("a", mark_of("another"))
            assert placement.has_strangers

    def test_an_expert_has_left_a_server_that_is_lost_or_hosts_it_no_longer(self):
        placement = self.make(a=("ffn.0",), b=())
        assert not placement.has_left("ffn.0", "a")
        placement.note_failure("a")
        assert placement.has_left("ffn.0", "a")
        placement.note_success("a")
        placement.note_replies("ab", {"a": reply(), "b": reply("ffn.0")})
        assert placement.has_left("ffn.0", "a")

    def test_an_expert_whose_server_is_forgotten_has_not_moved_to_its_replica(self):
        placement = self.make(a=("ffn.0", "ffn.1"), b=("ffn.0",))
        placement.note_replies("b", {"b": reply("ffn.0", "ffn.1")})
        placement.forget_all_but(["b"])
        assert [placement.moved_to(name, "a") for name in ("ffn.0", "ffn.1")] == [(), ("b",)]

    def test_of_a_server_that_is_forgotten_nothing_else_is_kept(self):
        placement = Placement(seed=0)
        placement.note_replies(["gone"], {"gone": pb.InfoReply(server_id="first")})
        placement.note_replies(["gone", "b"], {"gone": reply("ffn.0"), "b": reply("ffn.1")})
        placement.note_failure("gone")
        placement.note_answer("gone", mark_of("another"))
        assert placement.is_lost("gone")
        assert placement.has_strangers
        placement.note_replies("b", {"b": reply("ffn.1")})
        placement.forget_all_but(["b"])
        assert not placement.is_lost("gone")
        assert not placement.has_strangers
        assert "gone" not in str(vars(placement))
        placement.note_answer("gone", mark_of("another"))  # of a call that was under way
        assert not placement.has_strangers, "nobody asks what is hosted there"

    def test_an_unknown_expert_has_no_host(self):
        placement = self.make(a=())
        assert (placement.hosts_of("ffn.0"), placement.home_of("ffn.0")) == ((), "")


def test_what_was_told_before_does_not_take_the_place_of_what_is_told_later():
    finding = Finding(Servers(["10.0.0.1:1"], Mock()), seed=0)
    told = [pb.InfoReply(experts=[pb.ExpertInfo(name="ffn.0", is_trained=it_is)]) for it_is in (False, True)]
    note = [threading.Thread(target=finding._note_replies, args=({"10.0.0.1:1": reply},)) for reply in told]
    experts = finding.placement.experts

    def experts_slowly() -> dict[str, HostedExpert]:
        found = experts()
        if threading.current_thread() is note[0]:
            note[1].start()
            note[1].join(0.2)  # it may have to wait for this one
        return found

    with patch.object(finding.placement, "experts", experts_slowly):
        note[0].start()
        for thread in note:
            thread.join()
    assert finding.hosted["ffn.0"].is_trained
