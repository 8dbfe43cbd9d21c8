"""What callables, modules and other objects hold, and what they name: found before they are called.

Tensors with history, which a call has to be cut off from; modules that calls share; and what can be done for one thread
at a time only, or has to be compiled, or talks with other ranks::

    what they hold     closures, in_modules, in_objects, leaves, reaching
    what they name     named, telling, lookups
    what they do then  compiled, ranks, per_sample
"""
