"""Elastic training: ranks are killed, agents join and leave, and the result of the training stays the same.

`rank` is the program of the ranks, and describes what they and the agents exchange.
"""
