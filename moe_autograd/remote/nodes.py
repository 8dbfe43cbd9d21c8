"""Where calls of a server become nodes of the autograd graph.

One node stands for all calls of one group in one pass::

    anchor ──┐                                          ┌── outputs of expert 0
    x of 0 ──┼──> _RemoteCalls ── one stream a server ──┼── outputs of expert 3
    x of 3 ──┘    (forward: Forward, backward: Backward)└── ...

Rules:

1. The *anchor* is a tensor without elements that requires grad. It stands for the experts' weights, which are
   not here: with it the outputs require grad even if no input does. It never gets a gradient. Where all experts of
   a pass are frozen, the pass does not lead to it.
2. An input's gradient is asked for only if the engine wants it now; the weights' gradients are gathered only if
   the engine goes to the anchor, of experts that are not frozen by then: torch's weights, too, take none while
   they are. So `torch.autograd.grad(loss, x)` changes nothing on any server.
3. A call none of whose outputs got a gradient is not made, as plain PyTorch would not run its backward.
4. Outputs that need no gradient (under `no_grad`, or neither weights nor inputs want one) are marked so, and
   the server keeps nothing for them. A pass with no others makes no node.
5. Outputs that the server computed from each other do not lead to each other here. Whoever asks for one that others
   were computed from gets an error (`used_elsewhere`).
6. The server's answer is a number, not a graph: whoever asks for a second derivative gets an error.
7. Random numbers follow from a seed of the caller's stream that travels with each call (`_random`, Rule 4): a forward
   that is repeated, by a retry, a replica or a checkpoint, draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_autograd.autograd.grouping import Failures
from moe_autograd.autograd.joining.joined import has_any, split, which_are_wanted
from moe_autograd.autograd.modules.used_elsewhere import tie_uses
from moe_autograd.autograd.once import not_twice
from moe_autograd.autograd.result_hooks import skip_missing_gradients
from moe_autograd.autograd.split_backward import is_in_first_part, is_wanted_later
from moe_autograd.autograd.this_backward import keeps_graph, refuse_other_engines
from moe_autograd.autograd.uncompiled import filled, is_backward_compiled, uncompiled
from moe_autograd.remote.inputs import check_tensors, check_transforms, dense, under_autocast
from moe_autograd.remote.parts import BackwardPart, Call

if TYPE_CHECKING:
    from moe_autograd.remote.connection import Connection
    from moe_autograd.remote.expert import RemoteExpert

_TWICE = (
    "remote expert: expected to be differentiated once, got a second time (create_graph=True). "
    "Its server returns numbers and not a graph; use a local expert where you need second derivatives."
)


def call_experts(
    connection: Connection,
    experts: Sequence[RemoteExpert],
    inputs: Sequence[tuple[Any, ...]],
    failures: Failures | None,
) -> list[Any]:
    """Call all experts at once, differentiably; return what each returned."""
    for expert, args in zip(experts, inputs, strict=True):
        check_tensors(expert.name, args)
    if experts:  # a user's own group may ask for none
        check_transforms(experts[0].name, (x for args in inputs for x in args))
    if torch._C._is_any_autocast_enabled():
        inputs = [
            under_autocast(connection.hosted[expert.name], args)
            for expert, args in zip(experts, inputs, strict=True)
        ]
    calls = [
        _call(connection, index, expert, args)
        for index, (expert, args) in enumerate(zip(experts, inputs, strict=True))
    ]
    flat: Sequence[Any]
    if any(call.keep_graph for call in calls):
        apply: Any = _RemoteCalls.apply
        own = connection.anchor
        anchor = own.view_as(own) if any(call.is_trained for call in calls) else own.detach()
        flat = apply(connection, calls, failures, anchor, *(x for args in inputs for x in args))
        connection.prepare_backward([call for call in calls if call.keep_graph], flat)
    else:
        flat = [y for outcome in connection.run_forward(calls, inputs, failures) for y in outcome.tensors]
    rows = split(flat, [call.num_outputs for call in calls])
    for call, row in zip(calls, rows, strict=True):
        if call.uses and call.keep_graph:
            _tie_uses(call, row)
    return [_result(call, row) for call, row in zip(calls, rows, strict=True)]


def _tie_uses(call: Call, row: Sequence[Tensor]) -> None:
    uses: dict[int, set[int]] = {}
    for place, used in zip(call.uses[::2], call.uses[1::2], strict=True):
        if place != used and row[place].requires_grad and row[used].requires_grad:
            uses.setdefault(place, set()).add(used)
    tie_uses(f"expert {call.expert!r}", row, uses)


def _result(call: Call, row: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...] | None:
    if call.is_sequence:
        return tuple(row)
    return row[0] if row else None  # it failed, and failures are left out


def _call(connection: Connection, index: int, expert: RemoteExpert, inputs: tuple[Any, ...]) -> Call:
    hosted = connection.check_inputs(expert.name, inputs)
    is_trained = hosted.is_trained and not expert._freeze.is_on
    keep_graph = torch.is_grad_enabled() and (is_trained or any(x.requires_grad for x in inputs))
    call_id = connection.numbering.next_call_id()
    evaluate = not expert.training
    return Call(index, expert.name, call_id, len(inputs), evaluate, keep_graph, is_trained, expert._freeze)


@skip_missing_gradients
class _RemoteCalls(torch.autograd.Function):
    """The node drawn above."""

    @staticmethod
    def forward(
        ctx: Any,
        connection: Connection,
        calls: list[Call],
        failures: Failures | None,
        anchor: Tensor,
        *flat_inputs: Tensor,
    ) -> tuple[Tensor | None, ...]:
        inputs = split(flat_inputs, [call.num_inputs for call in calls])
        outcomes = connection.run_forward(calls, inputs, failures)
        ctx.connection, ctx.calls, ctx.failures = connection, calls, failures
        ctx.node = connection.left_forwards.node_of(calls)
        ctx.set_materialize_grads(False)
        kept = [args for call, args in zip(calls, inputs, strict=True) if call.keep_graph]
        ctx.save_for_backward(*(x for args in kept for x in args))
        loose = [outcome for call, outcome in zip(calls, outcomes, strict=True) if not call.keep_graph]
        ctx.mark_non_differentiable(*(y for outcome in loose for y in outcome.tensors))  # rule 4
        return tuple(y for outcome in outcomes for y in outcome.tensors)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *flat_grad_outputs: Tensor | None) -> Sequence[Tensor | None]:
        refuse_other_engines("remote expert", ctx)
        calls: list[Call] = ctx.calls
        (anchor_node, _), *edges = ctx.next_functions
        num_inputs = [call.num_inputs for call in calls]
        # What the first part of a split backward leaves out, nobody asks for again.
        wants = [True] * len(edges) if is_in_first_part() else which_are_wanted([node for node, _ in edges])
        wanted = split(wants, num_inputs)
        given = split(dense(flat_grad_outputs), [call.num_outputs for call in calls])
        kept = [call.num_inputs if call.keep_graph else 0 for call in calls]
        inputs = split(ctx.saved_tensors, kept)  # raises if the graph is gone, or if one was changed in place
        parts = [
            BackwardPart(*each)
            for each in zip(calls, inputs, given, wanted, strict=True)
            if each[0].keep_graph
        ]
        grads_of = ctx.connection.run_backward(
            [part for part in parts if has_any(part.grad_outputs)],  # rule 3
            ctx.failures,
            wants_weight_grads=any(which_are_wanted([anchor_node])) or is_wanted_later(anchor_node),
            keep_graph=keeps_graph(),
        )
        if torch.is_grad_enabled():  # create_graph=True
            for part in parts:
                sources = (ctx.connection.anchor, *part.inputs, *part.grad_outputs)
                if (own := grads_of.get(part.call.call_id)) is not None:
                    grads_of[part.call.call_id] = not_twice(own, sources, _TWICE)  # rule 6
        grads = [grad for call in calls for grad in grads_of.get(call.call_id, [None] * call.num_inputs)]
        if not is_backward_compiled():
            return (None, None, None, None, *grads)
        # to be added up, where there are several passes
        nothing = None if anchor_node is None else torch.zeros_like(ctx.connection.anchor)
        return filled(ctx.next_functions, (None, None, None, nothing, *grads))
