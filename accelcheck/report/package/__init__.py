"""What is handed over of a qualification: journals with all that they were judged by, in one file that says whether it was altered.

A package is a tar archive of plain files without compression (`archive`), whose first member lists all others with their SHA-256
(`manifest`). Every journal has a hash chain of its lines (`chain`), and the manifest may be signed (`signing`). No torch.
"""
