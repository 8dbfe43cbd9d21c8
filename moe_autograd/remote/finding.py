"""Finding experts: which servers there are, what they host, and which of them are lost.

A server that did not answer when it was asked last is *lost* until it does. Nothing is sent to a lost server before it
has been asked again, which takes a second at most: whether a connection can be made is for grpc to find out meanwhile,
and takes it long where packets vanish.

Looking has a pool of threads to itself, since threads of `Delivery` wait for it.

Mutable state: what servers have told, replaced as a whole, by one thread after the other (`_noting`).

Threads: any.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable, Mapping

from moe_autograd.errors import (
    DeadlineExceededError,
    ExpertNotFoundError,
    RemoteError,
    ServerUnavailableError,
)
from moe_autograd.remote.asking import ask
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.fanout import Fanout
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.placement import HostedExpert, Placement
from moe_autograd.remote.retry import is_worth_retrying
from moe_autograd.remote.servers import Servers
from moe_autograd.wire import experts_pb2 as pb

_LOOK_TIMEOUT_S = 1.0
_LOOK_AGAIN_S = 1.0
_LEAST_ATTEMPT_S = 0.1
_PAUSES_S = (0.0, 0.05)  # between attempts
_ROUND_TRIPS = 3


class Finding:
    """Asks servers what they host.

    Args:
        servers: there are.
        seed: chooses among replicas; see `Placement`.

    Attributes:
        hosted: what servers said of each expert when they were asked last; replaced as a whole.
        trained: experts that this client trains; names are only added.
    """

    def __init__(self, servers: Servers, seed: int) -> None:
        self.servers = servers
        self.placement = Placement(seed)
        self.hosted: Mapping[str, HostedExpert] = {}
        self.trained: set[str] = set()
        self._first_told: Mapping[str, HostedExpert] = {}
        self._looked_at = -math.inf
        self._noting = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._looking = Fanout(servers.expected_number)

    def look(self, operation: Operation, *, may_miss: bool = False) -> list[Exception]:
        """Find out which servers there are, and ask all of them once what they host.

        Args:
            operation: that waits for it.
            may_miss: whether others go on without a server that is given: then it is not waited for to the end.

        Returns:
            For each address that the user gave and behind which no server answered, why. Unless one may miss, also why
            one that is there is not trusted, or does not trust us: its experts would be missing without a word.
        """
        return self.servers.missing(self._ask_all(operation, math.inf, may_miss=may_miss), may_miss=may_miss)

    def look_briefly(self, operation: Operation) -> dict[str, Exception]:
        """Look in the middle of an operation; return the addresses that did not answer, each with the reason."""
        errors = self._ask_all(operation, _LOOK_TIMEOUT_S, may_miss=False)
        return {address: error for address, error in errors.items() if _is_no_answer(error)}

    def meet_strangers(self, operation: Operation) -> None:
        """Ask anew what is hosted, if a server answers that was started since."""
        if self.placement.has_strangers:
            self.look_briefly(operation)

    def changes_of(self, name: str) -> str:
        """Return what has changed since an expert was found first, as a sentence of an error; empty: nothing."""
        return self.hosted[name].changes_since(self._first_told[name]) if name in self.hosted else ""

    def hosts_of(self, name: str) -> tuple[str, ...]:
        """Return the servers of an expert, at least one: where nobody says that he has it, those that said so last.

        What is sent there fails, or is looked for first, as at any server that is lost or has dropped an expert; so it
        is found when it is there again.
        """
        return self.placement.hosts_of(name) or self.hosted[name].addresses

    def home_of(self, name: str) -> str:
        """Return the server of the weights that this client trains; where nobody says that he has it, as `hosts_of`."""
        return self.placement.home_of(name) or self.hosted[name].addresses[0]

    def is_lost(self, address: str) -> bool:
        """Tell whether a server has failed and not answered since, or is known no more."""
        return self.placement.is_lost(address) or address not in self.servers.addresses

    def moved(self, address: str, names: Iterable[str], *, to_all: bool = False) -> dict[str, list[str]]:
        """Return, by address, where experts are now that were at one; empty: all of them are still there.

        Args:
            address: where they were.
            names: of the experts.
            to_all: whether each is wanted at all the servers that it has moved to, and not at the first alone.
        """
        parts: dict[str, list[str]] = {}
        for name in names:
            hosts = self.placement.now_at(name, address) or (address,)
            for host in hosts if to_all else hosts[:1]:
                parts.setdefault(host, []).append(name)
        return {} if parts.keys() == {address} else parts

    def is_worth_looking(self, names: Collection[str]) -> bool:
        """Tell whether to look for experts that a server does not host: not all the time if nobody did just now."""
        is_news = all(self.placement.hosts_of(name) for name in names)
        return is_news or time.monotonic() - self._looked_at >= _LOOK_AGAIN_S

    def as_lost(self, error: RemoteError, names: Iterable[str]) -> RemoteError:
        """Return the error of a server that is lost, where experts are not found since theirs is away."""
        if not isinstance(error, ExpertNotFoundError) or not any(map(self.placement.is_away, names)):
            return error
        lost = ServerUnavailableError(f"{error} Servers are away, and its own may be one of them.")
        lost.__cause__ = error
        return lost

    def close(self) -> None:
        """Let the threads go when they are done."""
        self._looking.close()

    def _ask_all(self, operation: Operation, timeout_s: float, *, may_miss: bool) -> dict[str, Exception]:
        """Return for each server that did not answer, and for each name that stands for none, why."""
        resolving_s = min(timeout_s, self.servers.resolver_patience_s(may_miss=may_miss))
        errors: dict[str, Exception] = {**self.servers.resolve(operation.part(resolving_s))}

        def info(address: str, _: None) -> pb.InfoReply:
            patience_s = self.servers.patience_s(address, may_miss=may_miss)
            part = operation.part(min(timeout_s, patience_s))
            reply = _ask_patiently(self.servers.channel(address), part)
            self.placement.note_up(address, reply.up_for_s)
            return reply

        asked = dict.fromkeys(self.servers.addresses)
        replies: dict[str, pb.InfoReply] = {}
        results = self._looking.at_each(asked, info, operation.cancellation)
        if operation.cancellation.is_cancelled:  # nobody was given the time
            return errors | {address: r for address, r in results.items() if isinstance(r, Exception)}
        for address, result in results.items():
            if isinstance(result, Exception):
                errors[address] = result
                if _is_no_answer(result) and operation.deadline.remaining_s:  # else nobody was given the time
                    self.placement.note_failure(address)
            else:
                replies[address] = result
                self.placement.note_success(address)
        self._note_replies(replies)
        return errors

    def _note_replies(self, replies: Mapping[str, pb.InfoReply]) -> None:
        with self._noting:  # else what was told before could take the place of what is told now
            told: dict[str, list[str]] = {}
            for address, reply in replies.items():
                for info in reply.experts:
                    told.setdefault(info.name, []).append(address)
            needed = {a for name, expert in self.hosted.items() if name not in told for a in expert.addresses}
            needed |= {self.placement.missed_home_of(name, told.get(name, ())) for name in [*self.trained]}
            counted = self.servers.settle(replies, needed)
            known = [
                address for address in self.servers.addresses if address in counted or address not in replies
            ]
            self.placement.note_replies(known, counted)
            self.placement.forget_all_but(self.servers.addresses)
            # What a server has dropped is still known, for a clear error.
            self.hosted = {**self.hosted, **self.placement.experts()}
            self._first_told = {**self.hosted, **self._first_told}
            self._looked_at = time.monotonic()

    def __repr__(self) -> str:
        return f"Finding({self.servers!r}, {self.placement!r})"


def _ask_patiently(channel: Channel, operation: Operation) -> pb.InfoReply:
    for pause_s in _PAUSES_S:
        try:
            return _ask(channel, operation)
        except RemoteError as error:
            # a connection that broke, which grpc may not have noticed at the second attempt; or a damaged answer
            has_time = operation.deadline.remaining_s >= _LEAST_ATTEMPT_S
            has_new_token = channel.token.is_renewed_since(operation.deadline.started_at)
            is_worth = is_worth_retrying(error, was_answered=False, has_new_token=has_new_token)
            if not (has_time and is_worth) or operation.cancellation.wait(pause_s):
                raise
    return _ask(channel, operation)


def _ask(channel: Channel, operation: Operation) -> pb.InfoReply:
    reply = ask(channel, "Info", pb.InfoRequest(), pb.InfoReply, operation)
    for _ in range(_ROUND_TRIPS if channel.wants_round_trip else 0):
        reply = ask(channel, "Info", pb.InfoRequest(), pb.InfoReply, operation)
    return reply


def _is_no_answer(error: Exception) -> bool:
    return isinstance(error, ServerUnavailableError | DeadlineExceededError)
