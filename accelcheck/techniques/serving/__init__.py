"""Techniques of serving large models: caches of keys and values, speculation, batching, adapters, packed weights."""
