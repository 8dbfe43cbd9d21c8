"""What `OffloadedExperts` refuses, before it takes anything over."""

from __future__ import annotations

from torch import nn


def check_choices(
    num_microbatches: int | None, update: str, max_resident_bytes: int | None, beside: object | None
) -> None:
    """Raise `ValueError` for options that make no sense."""
    if num_microbatches is not None and num_microbatches < 1:
        raise ValueError(
            f"OffloadedExperts: expected num_microbatches of at least 1 or None, got {num_microbatches}."
        )
    if (max_resident_bytes is None) == (beside is None):
        raise ValueError(
            "OffloadedExperts: expected max_resident_bytes or beside, got "
            f"max_resident_bytes={max_resident_bytes} and beside={beside!r}. Pass one of them."
        )
    if update not in ("on_step", "on_backward"):
        raise ValueError(f"OffloadedExperts: expected update='on_step' or 'on_backward', got {update!r}.")


def check_hooks(name: str, module: nn.Module) -> None:
    """Raise `ValueError` for hooks that would never run: nothing is accumulated in `.grad`."""
    for parameter_name, parameter in module.named_parameters():
        hooks = parameter._post_accumulate_grad_hooks  # a dict or None
        if hooks:
            raise ValueError(
                f"OffloadedExperts: expected no post-accumulate-grad hooks, got {len(hooks)} on {parameter_name} of "
                f"{name}, whose gradients are not in .grad. Remove them; update='on_backward' updates in the backward."
            )
