"""Measurements that are no cases, started by commands: compile curve, published claims, duets, doctor.

They use techniques and checks; nothing that pytest collects imports them.
"""
