"""``torchrun`` for the techniques that train in several processes, and the evidence that these did their work.

The trainings are in the packages of their families.
"""
