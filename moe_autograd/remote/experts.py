"""`connect` and what it returns: the experts of some servers, by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_autograd._natural_order import natural_order
from moe_autograd.errors import ConfigError, ExpertNotFoundError, listed
from moe_autograd.remote.addresses import check_addresses
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.checking import check_arguments, check_kind_of_addresses
from moe_autograd.remote.compression import Compression, Encodings
from moe_autograd.remote.config import load_config
from moe_autograd.remote.connection import Connection
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.delivery import Settings
from moe_autograd.remote.expert import RemoteExpert
from moe_autograd.remote.hedging import HedgePolicy
from moe_autograd.remote.placement import HostedExpert
from moe_autograd.remote.retry import RetryPolicy
from moe_autograd.remote.security import TLS, Certificates, Token
from moe_autograd.remote.servers import Servers
from moe_autograd.remote.state import check_apart, joined_states, split_by_expert
from moe_autograd.wire.tensors import TensorLimits


def connect(
    addresses: str | Path | Sequence[str],
    *,
    token: str | Path | None = None,
    tls: TLS | None = None,
    timeout_s: float = 30.0,
    compression: str | Compression = "none",
    retry: RetryPolicy | None = None,
    hedge: bool | HedgePolicy = False,
    allow_missing: bool = False,
    max_tensor_bytes: int = 1 << 30,
) -> RemoteExperts:
    """Connect to expert servers and find out what they host.

    Args:
        addresses: `host:port`, or several. An expert may be at several of them (replicas). A name stands for the
            servers at all addresses that it resolves to, now and whenever one of them is lost. Or a TOML file, as a
            `Path` or a name that ends in `.toml`: it sets `addresses` and any of the arguments below; see
            `moe_autograd.remote.config`.
        token: for servers that ask for one. The `Path` of a file that holds it is read again when it is refused.
        tls: for servers that are reached encrypted; None for a plain connection.
        timeout_s: of every operation: a pass over all servers, an update, this call. Covers everything: looking
            for the expert, connecting, waiting in the server's queue, computing, transfer, and retries.
        compression: how floating tensors travel: "none", "bfloat16", "float16", "int8", a `Compression`, or "auto":
            chosen once for each direction from the measured bandwidth; see `moe_autograd.remote.compression`.
        retry: when calls are made again; None for the defaults of `RetryPolicy`.
        hedge: whether a forward that takes unusually long is asked again at another replica: the first answer wins.
            For replicas that are alike: ones that are trained are different experts. A `HedgePolicy` says when.
        allow_missing: whether some of the addresses may have no server yet, or no more. One of several that says
            nothing is then waited for 5 s.
        max_tensor_bytes: larger tensors are not accepted from a server.

    Returns:
        The experts by name; a context manager that disconnects at its end.

    Raises:
        TypeError: an argument is of another type.
        ValueError: or has a value that is none: an address that is not `host:port`, a token that no header can carry
            or its file does not hold, a file of `tls` that is no certificate (or `OSError`, if it cannot be read);
            `timeout_s` is no such time, or the compression unknown, whatever their type.
        ConfigError: the file cannot be read, or a key or value in it is not allowed or also given as an argument.
        ServerUnavailableError: a server is not there, or does not accept the certificate of `tls`. This call does not
            wait for it.
        UntrustedServerError: its own is not accepted.
        PermissionDeniedError: it does not accept the token.
        RemoteError: or another of its subclasses.

    Threads: any.
    """
    given = {
        "token": token,
        "tls": tls,
        "timeout_s": timeout_s,
        "compression": compression,
        "retry": retry,
        "hedge": hedge,
        "allow_missing": allow_missing,
        "max_tensor_bytes": max_tensor_bytes,
    }
    if isinstance(addresses, Path) or (isinstance(addresses, str) and addresses.endswith(".toml")):
        return connect(**_merged(Path(addresses), given))
    check_kind_of_addresses(addresses)
    check_arguments(given)
    servers = check_addresses([addresses] if isinstance(addresses, str) else list(addresses))
    Deadline(timeout_s)  # refuses what is none
    settings = Settings(
        timeout_s,
        retry or RetryPolicy(),
        Encodings(Compression.of(compression)),
        HedgePolicy() if hedge is True else hedge or None,
    )
    open_channel = functools.partial(
        Channel,
        token=Token(token),
        certificates=None if tls is None else Certificates(tls),
        server_name=None if tls is None else tls.server_name,
        encodings=settings.encodings,
        limits=TensorLimits.of_one_tensor(max_tensor_bytes),
    )
    connection = Connection(Servers(servers, open_channel), settings)
    try:
        connection.ask(allow_missing=allow_missing)
    except BaseException:
        connection.close()
        raise
    return RemoteExperts(connection)


def _merged(file: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file sets and what the arguments of `connect` add to it."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(connect).parameters.items()}
    added = {name: value for name, value in given.items() if value != defaults[name]}
    settings = load_config(file)
    for name in settings.keys() & added.keys():
        raise ConfigError(
            f"config {str(file)!r}, key {name!r}: expected it in the file or as an argument, got both. Leave one out."
        )
    return settings | added


class RemoteExperts(Mapping[str, RemoteExpert]):
    """The experts of some servers: a mapping from names to modules, in natural order (ffn.2 before ffn.10).

    `MixtureOfExperts(router, experts)` takes it as it is.

    Args:
        connection: with what its servers host.

    Threads: any.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._experts = {
            name: RemoteExpert(name, connection) for name in sorted(connection.hosted, key=natural_order)
        }

    def __getitem__(self, name: str) -> RemoteExpert:
        try:
            return self._experts[name]
        except KeyError:
            raise ExpertNotFoundError(
                f"expert {name!r}: expected one of {len(self)} ({listed(self._experts)}), got none of that name at "
                f"{', '.join(self._connection.addresses)}. `experts-server info` shows what is hosted."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._experts)

    def __len__(self) -> int:
        return len(self._experts)

    @property
    def connection(self) -> Connection:
        """What the experts share."""
        return self._connection

    @property
    def compression(self) -> Compression:
        """How tensors travel now; where "auto" was asked for, what it has chosen."""
        return self._connection.compression

    def info(self) -> dict[str, HostedExpert]:
        """Ask the servers again: the number of updates, for one, is as of now.

        Returns:
            What servers say, by the experts' names. Experts are left out if none of their servers answers.

        Raises:
            ServerUnavailableError: no server answers.
            RemoteError: or another of its subclasses.
        """
        hosted = self._connection.ask(allow_missing=True)
        return {name: hosted[name] for name in self if name in hosted}

    def state_dict(self) -> dict[str, Tensor]:
        """Fetch the weights of all experts.

        Returns:
            Tensors on the CPU, by `<expert>.<key>`; beside them the versions of hosted modules, as in torch.

        Raises:
            ValueError: `<expert>.<key>` could be of either of two experts.
            PermissionDeniedError: the token does not allow it.
        """
        check_apart(self._connection.hosted)
        states = self._connection.fetch_states(list(self))
        return joined_states({name: states[name] for name in self})

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Set the weights of all experts that `state_dict` has keys of, on every server that hosts them.

        A server checks all of them before it changes the first. Optimizer state stays as it is. Tensors of other dtypes
        are converted, as in torch.

        Args:
            state_dict: what `state_dict` returned, or a part of it that is complete for each of its experts. Without
                versions of modules, as in a plain dict, it counts as one of the classes that servers have now.

        Raises:
            TypeError: it is no mapping of tensors.
            KeyError: a key belongs to no expert.
            ValueError: or could belong to either of two.
            InvalidCallError: an expert has other keys or shapes.
            PermissionDeniedError: the token does not allow it.
        """
        check_apart(self._connection.hosted)
        self._connection.send_states(split_by_expert(state_dict, self))

    def close(self) -> None:
        """Disconnect; calls under way fail."""
        self._connection.close()

    def __enter__(self) -> RemoteExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RemoteExperts({len(self)} experts at {', '.join(self._connection.addresses)})"
