"""accelcheck: does every PyTorch acceleration technique give the right result on this machine?"""

__version__ = "0.1.0"
