"""Reports for people, made from records alone.

Nothing here runs a case or imports torch at its top.
"""
