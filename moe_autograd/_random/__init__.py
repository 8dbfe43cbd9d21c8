"""Give every call of a map its own random numbers, whatever the scheduling.

torch has one CPU generator for the whole process. Calls that run concurrently would take their numbers from it in
the order in which the threads happen to arrive, and forking its state does not help: it is one object. So while a
thread runs calls of a map, random operators are handed the call's own generator instead:

1. *Which operators* (`operators`). Those that take a `generator` argument in the dispatcher; everything else that is
   random (`dropout`, `nn.LSTM`) is composed of them. Each gets a second kernel, for a dispatch key that is switched on
   only in threads that run calls. So do `rand_like` and others that draw within their own kernels: a dispatch mode,
   such as that of a selective checkpoint, switches the key off there.
   Fused attention (`fused`) takes no generator, it asks the device's: while its kernel is started, that one shares the
   state of the call's own. A recurrent layer of cuDNN gets a dropout state, which is seeded by the call's own.
2. *Which numbers* (`seeds`). All calls of a map share one base, a number that the caller's stream would draw next; a
   call's generator is seeded from the base and the call's index. The caller's stream advances by that one draw when
   the first call draws, and not at all when none does. In a nested map the caller's stream is the outer call's own.
3. *Reading and setting the state* (`stand_ins`). `torch.get_rng_state`, `set_rng_state`, `manual_seed` and
   `fork_rng` reach the call's generator too: while maps run, stand-ins for the generators of the process and of an
   accelerator's devices ask who is calling. Thereby `torch.utils.checkpoint`, which saves the state in the forward
   and sets it again in the backward, sees the same dropout masks among concurrent calls. From a state that was set,
   draws are not the caller's: a recomputation leaves its stream alone, as it does in plain PyTorch.
4. *Calls elsewhere* (`elsewhere`). An expert on a server draws there, from a generator that is seeded as the call's own
   would be; the seed travels with the call. Only when a server has said that one drew does the caller's stream advance.
   Until then calls of other threads pass over the base, or they would draw the same numbers.

Nothing is installed before the first map runs. An operator that is given a generator by the user keeps it.

Threads: one `CallSeeds` belongs to one map and is shared by its threads. Each of them enters `own_streams`, and sets
`running.index` before each call.
"""

from moe_autograd._random.elsewhere import seeds_elsewhere
from moe_autograd._random.scope import own_streams
from moe_autograd._random.seeds import CallSeeds, GivenSeeds, running, take_places

__all__ = ["CallSeeds", "GivenSeeds", "own_streams", "running", "seeds_elsewhere", "take_places"]
