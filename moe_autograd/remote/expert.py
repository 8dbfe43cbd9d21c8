"""A remote expert as users see it: a module whose weights are on a server."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from moe_autograd._metadata import metadata_below, metadata_of, path_within, with_metadata
from moe_autograd.autograd.grouping import call_alone
from moe_autograd.errors import InvalidCallError, listed
from moe_autograd.remote.parts import Freeze
from moe_autograd.remote.placement import HostedExpert
from moe_autograd.remote.state import places_of

if TYPE_CHECKING:
    from moe_autograd.remote.connection import Connection


class RemoteExpert(nn.Module):
    """An expert on a server, called like any module; `connect` makes them.

    It has no parameters here: `RemoteOptimizer` trains it where it lives, unless it is frozen for this client by
    `requires_grad_(False)`. `train()` and `eval()` travel with each call. `state_dict()` and `load_state_dict()`,
    also of a model that it is part of, fetch and set the hosted weights, under the keys that the same module would
    have here. What is registered on it here, such as an adapter that its hooks use, is saved and loaded with them.

    Args:
        name: on the server.
        connection: shared by all experts of one `connect`.

    Autograd: gradients flow to the inputs that require them, and to the weights on the server. Differentiable
    once; a second derivative raises. Inputs are saved, as any function saves its inputs.

    Threads: may be called from several. A call blocks until its result is here or its deadline has passed; from
    asyncio, call it by `in_thread`.
    """

    def __init__(self, name: str, connection: Connection) -> None:
        super().__init__()
        self.name = name
        self._connection = connection
        self._freeze = Freeze()

    @property
    def call_group(self) -> Connection:
        """What this expert shares with those that can be called together with it."""
        return self._connection

    @property
    def hosted(self) -> HostedExpert:
        """What its server said of it when it was asked last: at `connect`, or since it was started anew."""
        return self._connection.hosted[self.name]

    @property
    def is_trained(self) -> bool:
        """Whether calls from here give the hosted weights gradients."""
        return self.hosted.is_trained and not self._freeze.is_on

    def requires_grad_(self, requires_grad: bool = True) -> RemoteExpert:
        """Say whether calls from here give the hosted weights gradients; as in torch, forward and backward both ask.

        A module that holds this one cannot pass it on: its `requires_grad_` knows parameters only.
        """
        self._freeze.is_on = not requires_grad
        super().requires_grad_(requires_grad)  # what was registered here
        return self

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        """Compute on the server.

        Args:
            inputs: dense tensors of any shape that the expert takes. Under autocast, floating ones are converted to
                the dtype that the server says it takes (`hosted.inputs`).
            named: refused, whatever they are: only positional tensors travel.

        Returns:
            What the expert returns: a tensor, or a tuple of tensors, on the device of the first input.

        Raises:
            InvalidCallError: the expert does not take such inputs.
            RemoteError: or another of its subclasses.
            TypeError: an input is no dense tensor, or has a name.
            UnsupportedTransformError: inside a `torch.func` transform or a trace, or with forward-mode tangents.
        """
        return call_alone(self, inputs, named)

    def extra_repr(self) -> str:
        """Show the name and where it is."""
        return f"{self.name!r}, kind={self.hosted.kind!r}, address={self._connection.address_of(self.name)!r}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Let `state_dict()` of any module that holds this one fetch the hosted weights, beside what is here.

        Raises:
            RuntimeError: something registered here has the name of something hosted.
        """
        self._refuse_hosted_names()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self._connection.fetch_states([self.name])[self.name]
        for key, tensor in state.items():
            destination[prefix + key] = tensor
        beside: dict[str, dict[str, Any]] | None = getattr(destination, "_metadata", None)
        if beside is not None:
            beside.get(path_within(prefix, ""), {}).pop("version", None)  # this class's own
            for path, values in metadata_of(state).items():
                beside.setdefault(path_within(prefix, path), {}).update(values)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Let `load_state_dict()` of any module that holds this one set the hosted weights, and what is here.

        All of an expert's or none: a state with some of its keys is refused, whatever `strict` is. Versions of modules
        that the state has travel with it; without them it counts as one of the class that the server has now.
        """
        self._refuse_hosted_names()
        not_here: list[str] = []
        super()._load_from_state_dict(  # also runs hooks, which may change the state
            state_dict, prefix, local_metadata, strict, missing_keys, not_here, error_msgs
        )
        keys = [entry.key for entry in self.hosted.layout.entries]
        hosted = {key: state_dict[prefix + key] for key in keys if prefix + key in state_dict}
        unexpected_keys += [key for key in not_here if key.removeprefix(prefix) not in hosted]
        if not hosted:
            missing_keys += [prefix + key for key in keys]
            return
        try:
            beside = metadata_below(prefix, local_metadata)
            self._connection.send_states({self.name: with_metadata(hosted, beside)})
        except (InvalidCallError, TypeError) as error:
            error_msgs.append(str(error))

    def _refuse_hosted_names(self) -> None:
        """Raise for what is registered here under a name that is hosted: a state could not have both."""
        here = {*self._parameters, *self._buffers, *self._modules}
        if clashing := here.intersection(entry.key.split(".")[0] for entry in self.hosted.layout.entries):
            raise RuntimeError(
                f"expert {self.name!r}, state_dict: expected what is registered here to have names of its own, got "
                f"{listed(sorted(clashing))}, which is hosted, too. Choose other names."
            )

    @property
    def _hosted_places(self) -> SimpleNamespace:
        return places_of(entry.key for entry in self.hosted.layout.entries)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Let `torch.distributed.checkpoint.state_dict` find what it has keys of: it looks for attributes."""
        return dict.fromkeys(vars(self._hosted_places), "_hosted_places")
