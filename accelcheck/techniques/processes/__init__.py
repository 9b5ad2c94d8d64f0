"""``torchrun`` for the families of techniques that train in several processes, and the evidence that these did their work.

What the processes train is in the packages of those families.
"""
