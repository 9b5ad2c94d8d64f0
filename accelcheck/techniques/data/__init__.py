"""Data loading: worker processes, page-locked memory, prefetching; each batch must arrive as it was sent.

Only loading is here; sharding a data set over ranks belongs to the distributed techniques.
"""
