"""Data loading: worker processes, page-locked memory, prefetching. Each batch must arrive unchanged."""
