"""Views of its own tensors that a module keeps from call to call, such as a transposed weight.

Their part's buffer will hold other weights. So they leave it and are found again by place in the next one, as weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from moe_autograd.autograd.offload.flat import Place, lies_in


class KeptViews:
    """What a module keeps in attributes, also in lists, tuples and dicts there, while its part is absent.

    Args:
        module: the expert.
        own: its parameters and buffers, which come and go anyway.
    """

    def __init__(self, module: nn.Module, own: Collection[Tensor]) -> None:
        self._module, self._own = module, {id(tensor) for tensor in own}
        self._kinds = {Tensor, *map(type, own)}
        self._absent: list[tuple[Tensor, Place]] = []

    def take_out(self, flat: Tensor) -> list[Tensor]:
        """Remember the places of those in a buffer, and return them."""
        found = [tensor for tensor in self._kept() if lies_in(tensor, flat)]
        self._absent += [(tensor, Place.of(tensor, flat)) for tensor in found]
        return found

    def put_into(self, flat: Tensor) -> None:
        """Point them to the same places in a buffer."""
        absent, self._absent = self._absent, []
        for tensor, place in absent:
            tensor.data = place.find(flat)

    def _kept(self) -> Iterator[Tensor]:
        for part in self._module.modules():
            found = [*vars(part).values()]
            for value in found[:]:  # no subclasses, whose own code would run
                if type(value) is dict:
                    found += value.values()
                elif type(value) in (list, tuple):
                    found += value
            for value in found:
                if type(value) in self._kinds and id(value) not in self._own:
                    yield value
