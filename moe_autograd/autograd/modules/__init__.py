"""A call of a module, cut out of the caller's graph: run by itself, its results joined, and backwards likewise.

::

    one call              module_calls, module_forwards, module_results, changes, upper_cuts
    all of them           joined_modules, escaped, inlet
    results from results  computed_from, used_results, uses, used_elsewhere
    second derivatives    passed
"""
