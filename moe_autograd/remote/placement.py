"""Which server hosts which expert, and which servers are left alone for a while.

A server's own word counts: what it said last it hosts, until it says otherwise. One that does not answer keeps
its place in the list, at its end, for a while that doubles each time it fails again.

An expert of a server that is lost has *moved* to those that host it now and did not host it beside that server. Those
that did are replicas, with weights and gradients of their own: both have answered at once, or one that answers now was
started before the lost one answered last.

Threads: any; one lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_autograd.errors import RemoteError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import mark_of
from moe_autograd.wire.specs import TensorSpec

_FIRST_REST_S = 0.5
_LONGEST_REST_S = 30.0


@dataclass(frozen=True)
class HostedExpert:
    """What a server says of an expert.

    Args:
        name: of the expert.
        kind: the module's class.
        addresses: the servers that host it, in the order in which this client asks them; those first that answered when
            all were asked last.
        num_parameters: of the module.
        is_trained: whether it has an optimizer.
        update: `"on_step"`, `"on_backward"` or `"on_samples"`.
        num_updates: how often it has been updated, on the server that says all this.
        optimizer: the optimizer's class; empty for none.
        inputs: what its inputs have to be, as far as the server says so.
        wants_hints: whether it comes and goes on its server, and is there sooner if that knows in time.
        may_draw: random numbers, in its forwards.
        layout: of its state, on that server.
    """

    name: str
    kind: str
    addresses: tuple[str, ...]
    num_parameters: int
    is_trained: bool
    update: str
    num_updates: int
    optimizer: str
    inputs: tuple[TensorSpec, ...] = ()
    wants_hints: bool = False
    may_draw: bool = False
    layout: pb.StateLayout = field(default_factory=pb.StateLayout, repr=False, compare=False)

    def changes_since(self, before: HostedExpert) -> str:
        """Return what a server says otherwise than `before`, as a sentence of an error; empty: nothing."""
        told = {key: (old, new) for key in _TOLD if (old := _told(before, key)) != (new := _told(self, key))}
        if not told:
            return ""
        listed = "; ".join(f"{key}: {old}, now {new}" for key, (old, new) in told.items())
        return f"Its server was started anew with another configuration ({listed})."


_TOLD = ("kind", "inputs", "is_trained", "update", "optimizer", "num_parameters")


def _told(hosted: HostedExpert, key: str) -> str:
    """Return what a server says of an expert, as text."""
    value = getattr(hosted, key)
    return ", ".join(map(TensorSpec.describe, value)) or "any" if key == "inputs" else repr(value)


class Placement:
    """The experts of some servers.

    Args:
        seed: chooses among replicas, so that different clients choose differently and one client always alike,
            whoever joins later: replicas that are trained are different experts as soon as they are.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._addresses: tuple[str, ...] = ()
        self._replies: dict[str, dict[str, pb.ExpertInfo]] = {}
        self._layouts: dict[str, Sequence[pb.StateLayout]] = {}  # by address
        self._answered: frozenset[str] = frozenset()  # when servers were asked last
        self._most_answered = 0  # at once, ever
        # by address and expert: its replicas, itself included
        self._beside: dict[str, dict[str, frozenset[str]]] = {}
        self._up_since: dict[str, float] = {}  # by address, of those that say so
        self._heard_at: dict[str, float] = {}  # by address: when it answered last
        self._rests: dict[str, tuple[float, float]] = {}  # address: (until when, for how long)
        self._favourites: dict[str, str] = {}  # expert: the replica that was chosen
        self._found: dict[str, tuple[str, ...]] = {}  # by expert, since servers were asked last
        self._replicated: frozenset[str] = frozenset()  # experts that several servers host, or hosted
        self._marks: dict[str, int] = {}  # by address: which server said last what it hosts
        self._strangers: frozenset[str] = frozenset()  # where another one has answered since

    def note_replies(self, known: Iterable[str], replies: Mapping[str, pb.InfoReply]) -> None:
        """Take servers' word for what they host.

        Args:
            known: the addresses of all servers there are, in order; others are forgotten.
            replies: of those that have just answered.
        """
        with self._lock:
            self._addresses = tuple(known)
            self._replies = {address: self._replies.get(address, {}) for address in self._addresses}
            for address, reply in replies.items():
                self._replies[address] = {info.name: info for info in reply.experts}
                self._layouts[address] = reply.layouts
                self._marks[address] = mark_of(reply.server_id)
            self._answered = frozenset(replies)
            self._most_answered = max(self._most_answered, len(replies))
            self._strangers -= self._answered
            self._found = {}
            self._note_replicas()

    def forget_all_but(self, addresses: Collection[str]) -> None:
        """Forget servers that are known no more, but for which replicas they had: what is there has not moved."""
        with self._lock:
            for known in (self._layouts, self._marks, self._rests, self._up_since):
                for address in known.keys() - {*addresses}:
                    known.pop(address, None)
            for address, beside_of in [*self._beside.items()]:
                if address not in addresses and all(beside <= {address} for beside in beside_of.values()):
                    self._beside.pop(address, None)
            for address in self._heard_at.keys() - {*addresses} - self._beside.keys():
                self._heard_at.pop(address, None)
            self._strangers &= {*addresses}

    def _note_replicas(self) -> None:
        hosts: dict[str, frozenset[str]] = {}
        for address in self._answered:
            for name in self._replies[address]:
                hosts[name] = hosts.get(name, frozenset()) | {address}
        self._replicated |= {name for name, addresses in hosts.items() if len(addresses) > 1}
        for address in self._answered:
            beside = self._beside.setdefault(address, {})
            for name in {*beside, *self._replies[address]}:
                now = hosts[name] if self._hosts(address, name) else frozenset()
                beside[name] = now | {other for other in beside.get(name, ()) if self._hosts(other, name)}
        for lost in self._beside.keys() - self._answered:
            met = {address for address in self._answered if self._was_beside(lost, address)}
            for name, replicas in self._beside[lost].items():
                if replicas:  # it hosted the expert when it answered last
                    self._beside[lost][name] = replicas | (hosts.get(name, frozenset()) & met)

    def _was_beside(self, lost: str, other: str) -> bool:
        return self._up_since.get(other, math.inf) < self._heard_at.get(lost, -math.inf)

    def _hosts(self, address: str, name: str) -> bool:
        return name in self._replies.get(address, ())

    def note_failure(self, address: str) -> None:
        """Leave a server alone for a while, as far as there is another."""
        with self._lock:
            now = time.monotonic()
            until, rest_s = self._rests.get(address, (0.0, 0.0))
            if now >= until:
                rest_s = min(_LONGEST_REST_S, 2 * rest_s or _FIRST_REST_S)
                self._rests[address] = (now + rest_s, rest_s)

    def note_success(self, address: str) -> None:
        """Note that a server has answered, and forget that it has failed."""
        with self._lock:
            self._heard_at[address] = time.monotonic()
            self._rests.pop(address, None)

    def note_up(self, address: str, for_s: float) -> None:
        """Note that a server says just now for how long it has been up; 0: it does not say."""
        with self._lock:
            now = self._heard_at[address] = time.monotonic()
            self._up_since[address] = now - for_s if for_s else math.inf

    def note_answer(self, address: str, mark: int) -> None:
        """Note which server has answered a call; 0: it does not say."""
        if mark and mark != self._marks.get(address, mark):
            with self._lock:
                self._strangers |= {address}

    @property
    def has_strangers(self) -> bool:
        """Whether a server answers that was started since it said what it hosts."""
        return bool(self._strangers)

    def is_lost(self, address: str) -> bool:
        """Tell whether a server has failed and not answered since."""
        return address in self._rests

    def is_away(self, name: str) -> bool:
        """Tell whether no server that answers hosts an expert, and one is away that may: fewer answer than once did.

        Its own may have lost its address to another one, and come back elsewhere.
        """
        with self._lock:
            is_hosted = any(self._hosts(address, name) for address in self._answered)
            return not is_hosted and len(self._answered) < self._most_answered

    def has_left(self, name: str, address: str) -> bool:
        """Tell whether a server is lost, or hosts an expert no longer."""
        return self.is_lost(address) or address not in self.hosts_of(name)

    def hosts_of(self, name: str) -> tuple[str, ...]:
        """Return the servers that host an expert, in the order in which this client would ask them."""
        found = None if self._rests else self._found.get(name)
        if found is not None:
            return found
        with self._lock:
            hosts = self._ordered_hosts(name)
            if not self._rests:  # which change the order with time
                self._found[name] = hosts
        return hosts

    def _ordered_hosts(self, name: str) -> tuple[str, ...]:
        hosts = [address for address in self._addresses if self._hosts(address, name)]
        if not hosts:
            return ()
        favourite = self._favourites.get(name, "")
        if favourite not in hosts:  # to where it has moved, if there is such a place
            replicas = self._beside.get(favourite, {}).get(name, frozenset())
            choice = [address for address in hosts if address not in replicas] or hosts
            favourite = self._favourites[name] = choice[self._seed % len(choice)]
        if len(hosts) == 1:
            return (favourite,)
        now = time.monotonic()
        first = hosts.index(favourite)
        return tuple(
            sorted(
                hosts[first:] + hosts[:first],
                key=lambda address: max(0.0, self._rests.get(address, (0.0,))[0] - now),
            )
        )

    def home_of(self, name: str) -> str:
        """Return where the weights are that this client trains: at the chosen replica, however lately it has failed.

        Where that is lost and the expert has moved, there. Empty: nobody hosts it.
        """
        hosts = self.hosts_of(name)
        if len(hosts) < 2 or not self._rests:
            return hosts[0] if hosts else ""
        with self._lock:
            if not self._ordered_hosts(name):
                return ""
            chosen = self._favourites[name]
            moved_to = self.moved_to(name, chosen) if self.is_lost(chosen) else ()
            return moved_to[0] if moved_to else chosen

    def missed_home_of(self, name: str, hosts: Collection[str]) -> str:
        """Return the home of an expert that is none of these servers, which host it now; empty: it is, or has moved."""
        home = self.home_of(name)
        with self._lock:
            replicas = self._beside.get(home, {}).get(name, frozenset())  # itself included
            has_moved = any(host not in replicas and not self._was_beside(home, host) for host in hosts)
        return "" if has_moved or home in hosts else home

    def replica_of(self, name: str, address: str) -> int:
        """Return which of several replicas is, or was, at an address; 0: there is one only, or nobody can tell.

        Those that began with copies of one checkpoint cannot be told apart.
        """
        if name not in self._replicated:
            return 0
        with self._lock:
            at = {host: infos[name].replica for host, infos in self._replies.items() if name in infos}
        own = at.get(address, 0)
        return own if list(at.values()).count(own) == 1 else 0

    def moved_to(self, name: str, lost: str, replica: int = 0) -> tuple[str, ...]:
        """Return the servers that an expert of a lost one has moved to, as far as they answered when asked last.

        Args:
            name: of the expert.
            lost: the server.
            replica: which of several was there: it has moved to where it is now; 0: whichever.
        """
        with self._lock:
            hosts = self._ordered_hosts(name)
            places = [a for a in hosts if a in self._answered and self._replies[a][name].replica == replica]
            if replica and places:
                return tuple(places)
            replicas = self._beside.get(lost, {}).get(name, frozenset())  # itself included
            return tuple(
                address for address in hosts if address in self._answered and address not in replicas
            )

    def now_at(self, name: str, lost: str) -> tuple[str, ...]:
        """Return the same; or, where the lost server says that it hosts the expert no longer, those that do."""
        moved_to, hosts = self.moved_to(name, lost), self.hosts_of(name)
        return moved_to if moved_to or lost in hosts else hosts

    def experts(self, *, as_of_now: bool = False) -> dict[str, HostedExpert]:
        """Return all experts by name.

        What is said of one that is trained somewhere is what its home said last, though that is away: to this client
        the weights there are the expert.

        Args:
            as_of_now: without those none of whose servers answered when all were asked last; said by those that did.
        """
        with self._lock:
            places: dict[str, list[tuple[str, pb.ExpertInfo]]] = {}
            for name in dict.fromkeys(name for infos in self._replies.values() for name in infos):
                places[name] = [(host, self._replies[host][name]) for host in self._ordered_hosts(name)]
            layouts, answered = dict(self._layouts), self._answered
            homes = {
                name: self.home_of(name)
                for name, found in places.items()
                if not as_of_now and any(info.is_trained for _, info in found)
            }
        return {
            name: _hosted(name, found, layouts, answered, homes.get(name, ""))
            for name, found in places.items()
            if not as_of_now or any(address in answered for address, _ in found)
        }

    def layout_at(self, address: str, name: str) -> pb.StateLayout | None:
        """Return that of an expert's state on one server, as that said last; `None`: it does not host it."""
        with self._lock:
            info = self._replies.get(address, {}).get(name)
            return None if info is None else _layout_of(info, self._layouts[address])

    def __repr__(self) -> str:
        now = time.monotonic()
        resting = [address for address, (until, _) in self._rests.items() if until > now]
        return f"Placement({len(self._addresses)} servers, resting: {resting})"


def _hosted(
    name: str,
    places: Sequence[tuple[str, pb.ExpertInfo]],
    layouts_at: Mapping[str, Sequence[pb.StateLayout]],
    answered: Collection[str],
    home: str,
) -> HostedExpert:
    places = sorted(places, key=lambda place: place[0] not in answered)
    address, info = next((place for place in places if place[0] == home), places[0])
    if info.update not in pb.UpdateMode.values():
        raise RemoteError(
            f"expert {name!r} at {address}: expected it to be updated on_step, on_backward or on_samples, got number "
            f"{info.update}. Is the server newer? Use a client of its version."
        )
    return HostedExpert(
        name=name,
        kind=info.kind,
        addresses=tuple(address for address, _ in places),
        num_parameters=info.num_parameters,
        is_trained=info.is_trained,
        update=pb.UpdateMode.Name(info.update).lower(),
        num_updates=info.num_updates,
        optimizer=info.optimizer,
        inputs=tuple(TensorSpec.of(spec) for spec in info.inputs),
        wants_hints=info.wants_hints,
        may_draw=any(info.may_draw for _, info in places),
        layout=_layout_of(info, layouts_at[address]),
    )


def _layout_of(info: pb.ExpertInfo, layouts: Sequence[pb.StateLayout]) -> pb.StateLayout:
    return layouts[info.layout] if info.layout < len(layouts) else pb.StateLayout()
