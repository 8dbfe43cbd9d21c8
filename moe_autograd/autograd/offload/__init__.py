"""Train more experts than fit into memory.

Begin with `experts`, and with `residency`, whose rules say what is in memory when::

    modules and calls      experts, expert, call, microbatches, drawing, casts, checks, misfits
    tensors of an expert   held, held_module, held_optimizer, flat, state_apart, kept_views, extra_state, owners
    what a graph keeps     saved, passing
    what is in memory      residency, parts, holders, guard, shared, freed_memory
    to the store and back  transfers, to_write, background, apart_streams, stores
    checkpoints            checkpoints, folder_locks
"""

from moe_autograd.autograd.offload.expert import OffloadedExpert
from moe_autograd.autograd.offload.experts import OffloadedExperts, read_ahead
from moe_autograd.autograd.offload.freed_memory import return_freed_memory_at_once
from moe_autograd.autograd.offload.stores import Store

__all__ = ["OffloadedExpert", "OffloadedExperts", "Store", "read_ahead", "return_freed_memory_at_once"]
