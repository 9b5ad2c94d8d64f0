"""accelcheck: does every PyTorch acceleration technique give the right result on this machine?

Other packages import from `accelcheck.api` alone; everything else may move between releases.
"""

__version__ = "0.1.0"
