"""Processes that several families of techniques start: ``torchrun``, and the evidence that such processes did their work.

Nothing here knows what is trained in them.
"""
