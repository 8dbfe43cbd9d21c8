"""Forwards and backwards on many threads: the map, its parts, and what trades memory for time.

Begin with `parallel`, which draws the three steps of a map. The first line of each file says what it is for::

    the maps                parallel, alone, in_turn, grouping, units, runs, notes, uncompiled, tracebacks
    what only computes      arithmetic, callees, known_arithmetic, work, sizes, spatial, growing, composed
    how functions are read  function_reading, readings, bytecode, bytecode_loops
    a call of a function    emulated, isolated, function_calls, unrecorded
    a call of a module      module_calls, module_results, module_forwards, joined_modules, upper_cuts, entry, per_sample
    results from results    computed_from, used_results, uses, used_elsewhere
    gradients of gradients  passed, batched
    one node for all calls  join, joined, left, histories, this_backward, boxed, grad_dtypes, accumulating, sums
    what calls hold         closures, in_modules, in_objects, leaves, reaching, compiled, ranks, escaped, inlet, anchors
    what calls name         named, telling, lookups
    walks over a graph      walks, deep
    what calls share        turns, watched, changes
    hooks                   hooks, ordered_hooks, result_hooks, sleeping_hooks, wrapped_hooks
    memory and time         recompute, deferred, split_backward, split_arguments, borders, saved_tensors, offload, once
"""
