"""The devices under test: one file each, and one generic for any other torch accelerator.

No module here imports torch at its top: nox, the plugin's controller and the probe's parent read them without it.
"""
