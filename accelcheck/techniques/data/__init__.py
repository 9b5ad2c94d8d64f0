"""Data loading: worker processes, page-locked memory, prefetching. Sharding over ranks is in `distributed`."""
