"""Memory layouts: memory formats, strided views, aliasing, index operators.

Nothing here changes what is computed or in which precision.
"""
