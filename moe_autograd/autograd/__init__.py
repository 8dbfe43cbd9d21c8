"""Forwards and backwards on many threads: the map, its parts, and what trades memory for time.

Begin with `parallel`, which draws the three steps of a map. The first line of each file says what it is for::

    the maps              parallel, alone, in_turn, grouping, units, runs, notes, uncompiled, tracebacks
    a call of a function  emulated, isolated, function_calls, unrecorded
    a call of a module    modules, entry
    one node for all      joining, this_backward, grad_dtypes, anchors
    before they begin     reading, contents
    walks over a graph    walks, deep
    what calls share      turns, watched
    hooks                 hooks, ordered_hooks, result_hooks, sleeping_hooks, wrapped_hooks
    memory and time       recompute, deferred, split_backward, split_arguments, borders, saved_tensors, offload, once

Five of these are rooms with maps of their own. `joining` has the one node that stands for all calls in the caller's
graph, `modules` cuts a module's call out of that graph and puts its results back. Before any call, `contents` finds
what callables hold, and `reading` whether they only compute: these two know nothing of maps. `offload` comes on top.
"""
