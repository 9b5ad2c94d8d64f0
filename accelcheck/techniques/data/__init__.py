"""Data loading: worker processes, page-locked memory, prefetching. Each batch must arrive unchanged.

Sharding a data set over ranks belongs to the distributed techniques.
"""
