"""Explains why a case failed: names the layer and the operator, and writes a script of the operator alone.

`layers` runs the case in other layers, `operators` computes each operator of the failing run again, `smallest` shrinks
the wrong one, and `script` writes it down.
"""
