"""Whether a callable only computes, and how much: read from its code, before it is called.

Calls that can neither wait nor be waited for may be made in turn, without threads (`in_turn`)::

    what only computes      arithmetic, callees, known_arithmetic
    how much work it is     work, sizes, spatial, growing, composed
    how functions are read  function_reading, readings, bytecode, bytecode_loops
"""
