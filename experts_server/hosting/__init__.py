"""One expert: its module, its optimizer, its forwards and backwards, and what it keeps between them.

Begin with `hosted`. The first line of each file says what it is for::

    the expert              hosted, building, modules, sharing, offloading, state, loading
    what is asked of it     calls, checks, failing
    forwards and backwards  calling, differentiating, kept, randomness, own_memory
    calls computed as one   joining, separating
    training                training, intake, gradients, gathered, later, ledger
"""
