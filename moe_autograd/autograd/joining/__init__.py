"""One node in the caller's graph for all calls of a map: it fans out, forwards and backwards, and gathers.

::

    the node               join, joined, boxed, left, histories
    gradients of one call  accumulating, sums
    for many at once       batched
"""
