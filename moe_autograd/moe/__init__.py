"""The mixture-of-experts layer: choose experts (router), move tokens (dispatch), combine what they return.

Read in this order: `routing` (the frozen decision), `routers` (who decides), `dispatch` (pure functions
that move tokens), `losses` (pure functions of the decision), `experts` (what an expert is, and two
built-in ones), `layer` (composes them; no numerics of its own), `in_turn` (the loop, without gradients), `idle` (zeros
for experts without tokens).
A layer that goes on without experts that fail composes `partial` instead, which stands on `failures`,
`attendance` and `stragglers`. Nothing here knows networks, and threads only as the clock that `stragglers`
has: a remote expert is just a module.
"""
