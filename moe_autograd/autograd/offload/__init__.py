"""Train more experts than fit into memory."""

from moe_autograd.autograd.offload.expert import OffloadedExpert
from moe_autograd.autograd.offload.experts import OffloadedExperts, read_ahead
from moe_autograd.autograd.offload.freed_memory import return_freed_memory_at_once
from moe_autograd.autograd.offload.stores import Store

__all__ = ["OffloadedExpert", "OffloadedExperts", "Store", "read_ahead", "return_freed_memory_at_once"]
