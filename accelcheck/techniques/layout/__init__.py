"""Memory layouts: memory formats, strided views, aliasing, index operators.

These techniques change neither what is computed nor its precision.
"""
