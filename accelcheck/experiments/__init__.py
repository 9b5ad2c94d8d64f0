"""Measurements that a command starts outside of the matrix: the compile curve, published claims, duets of two environments.

They use techniques and checks; nothing that pytest collects imports them.
"""
