"""Why a case failed: the layer, the operator, and a script of it alone.

`layers` runs the case in other layers, `operators` computes each operator of the failing run again, `smallest` shrinks
the wrong one, and `script` writes it down.
"""
