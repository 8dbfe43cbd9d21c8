"""The servers that a client knows of, and a channel to each.

Rules:

1. An address with a number stands for the server there, whether it is there or not.
2. An address with a name stands for the servers at all addresses that the name resolves to. It is resolved anew
   whenever servers are looked for, so that one that returns elsewhere, or is added, is found.
3. What a name no longer resolves to stays as long as it answers: some name servers tell a part at a time; and as long
   as nobody else has its experts, or only replicas of those that this client trains: they may be at an address that
   says nothing yet, and are waited for.
4. A server tells its identity, new at every start. Two addresses with one identity are one server, and the first
   of them counts: a machine with two networks is not two replicas.
5. A server is called by a name that stands for it now: those of two names may have changed places, and each has a
   certificate of its own.

A channel to an address that stands for nothing any more is let go. RPCs under way keep it until they end; whoever asks
for it later, as the backward of a forward there does, gets a new one.

Mutable state: `_channels` and `_behind`, replaced as wholes under `_lock`; `_resolved`, by one assignment an address.

Threads: any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from moe_autograd.errors import PermissionDeniedError, ServerUnavailableError, UntrustedServerError
from moe_autograd.remote.addresses import resolve
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.operations import Operation
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.addresses import is_name

_REFUSED = (PermissionDeniedError, UntrustedServerError)
_FIRST_WORD_S = 5.0
_EXPECTED_BEHIND_NAME = 16


class Servers:
    """What the addresses that a user gave stand for.

    Args:
        given: the addresses, each `host:port`.
        open_channel: given an address with a number and the one that it stands behind, whose name certificates have,
            returns a channel.
    """

    def __init__(self, given: Sequence[str], open_channel: Callable[[str, str], Channel]) -> None:
        self.given = tuple(given)
        self._open_channel = open_channel
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._names = tuple(filter(is_name, given))
        self._channels: dict[str, Channel] = {}
        self._behind: dict[str, tuple[str, ...]] = {}
        self._resolved: dict[str, frozenset[str]] = {}
        self._is_open = True
        for address in given:
            self._change_behind(address, () if address in self._names else (address,))

    @property
    def addresses(self) -> tuple[str, ...]:
        """All servers known now, in the order of what was given."""
        return tuple(dict.fromkeys(address for behind in self._behind.values() for address in behind))

    @property
    def may_change(self) -> bool:
        """Whether an expert that is lost here may be found elsewhere."""
        return bool(self._names) or len(self.given) > 1

    @property
    def expected_number(self) -> int:
        """About how many servers there are at most; names may stand for several."""
        return len(self.given) + _EXPECTED_BEHIND_NAME * len(self._names)

    def patience_s(self, address: str, *, may_miss: bool) -> float:
        """How long to wait for a first word of a server: name servers also tell addresses where nobody is.

        Args:
            address: of the server.
            may_miss: whether the others go on without it.
        """
        is_expected = address in self.given and not (may_miss and len(self.given) > 1)
        return math.inf if is_expected else _FIRST_WORD_S

    def resolver_patience_s(self, *, may_miss: bool) -> float:
        """How long to wait for the addresses of names: those known before will do, and so may the others' servers."""
        is_needed = not all(self._behind[name] for name in self._names)
        return math.inf if is_needed and not (may_miss and len(self.given) > 1) else _FIRST_WORD_S

    def channel(self, address: str) -> Channel:
        """Return the channel to a server that is or was known."""
        channel = self._channels.get(address)
        return self._reopened(address) if channel is None else channel

    def _reopened(self, address: str) -> Channel:
        """Return a new channel to an address that stood behind a name; it is let go again as others are."""
        with self._lock:
            if (channel := self._channels.get(address)) is not None:
                return channel
            channel = self._open_channel(address, next(iter(self._names), address))
            if self._is_open:
                self._channels = {**self._channels, address: channel}
            else:
                channel.close()
            return channel

    def resolve(self, operation: Operation) -> dict[str, ServerUnavailableError]:
        """Resolve all names anew (rule 2); return why those that could not be keep what they had."""
        if not self._names:
            return {}
        errors: dict[str, ServerUnavailableError] = {}
        names_of: dict[str, list[str]] = {}
        for name, found in resolve(self._names, operation).items():
            if isinstance(found, ServerUnavailableError):
                errors[name] = found
                continue
            self._resolved[name] = frozenset(found)
            self._change_behind(name, found)
            for address in found:
                names_of.setdefault(address, []).append(name)
        self._call_by(names_of)
        return errors

    def _call_by(self, names_of: Mapping[str, Sequence[str]]) -> None:
        """Call servers by names that stand for them now (rule 5)."""
        for address, names in names_of.items():
            channel = self._channels.get(address)  # none: it is being closed
            if channel is not None and channel.authority not in (address, *names):
                channel.call_by(names[0])

    def settle(self, replies: Mapping[str, pb.InfoReply], needed: Collection[str]) -> dict[str, pb.InfoReply]:
        """Forget what rule 3 says, and return the replies without the doubles of rule 4.

        Args:
            replies: of the servers that answered when all were asked.
            needed: addresses that had experts which none of them has; see rule 3.
        """
        for name in self._names:
            keeps = {*self._resolved.get(name, ()), *replies, *needed}
            self._change_behind(name, (), keeps)
        self._let_go()
        first_of: dict[str, str] = {}
        for address in self.addresses:
            if address in replies:
                first_of.setdefault(replies[address].server_id or address, address)
        return {address: replies[address] for address in first_of.values()}

    def missing(self, errors: Mapping[str, Exception], *, may_miss: bool) -> list[Exception]:
        """Return, for each address given behind which no server answered, why; see `Finding.look`.

        Args:
            errors: of the servers, and of the names, that did not answer.
            may_miss: whether one that refuses is no error as long as another answers.
        """
        missing = []
        for given in self.given:
            behind = self._behind[given]
            named = [address for address in behind if address in self._resolved.get(given, behind)]
            refused = [errors[address] for address in named if isinstance(errors.get(address), _REFUSED)]
            if refused and not may_miss:
                missing.append(refused[0])
            elif all(address in errors for address in behind):
                missing.append(errors[named[0]] if named else errors[given])
        return missing

    def wait_until_told(self, until_s: float) -> None:
        """Wait until what was told them has been answered, or until this time (`time.monotonic`); never fails."""
        for channel in self._channels.values():
            channel.wait_until_told(until_s)

    def close(self) -> None:
        """Disconnect from all."""
        with self._lock:
            self._is_open = False
            for channel in self._channels.values():
                channel.close()

    def _change_behind(self, given: str, added: Sequence[str], keeps: Collection[str] | None = None) -> None:
        """Add servers behind a given address, or keep only some of them."""
        with self._lock:
            for address in added:
                if address not in self._channels and self._is_open:
                    self._channels = {**self._channels, address: self._open_channel(address, given)}
            behind = dict.fromkeys((*self._behind.get(given, ()), *added))
            kept = tuple(
                address
                for address in behind
                if address in self._channels and (keeps is None or address in keeps)
            )
            self._behind = {**self._behind, given: kept}

    def _let_go(self) -> None:
        """Let go of channels to addresses that stand for nothing any more."""
        with self._lock:
            known = {*self.addresses}
            gone = [channel for address, channel in self._channels.items() if address not in known]
            if gone and self._is_open:
                self._channels = {a: channel for a, channel in self._channels.items() if a in known}
        for channel in gone:
            channel.end_left()

    def __repr__(self) -> str:
        return f"Servers({', '.join(self.given)}: {', '.join(self.addresses)})"
