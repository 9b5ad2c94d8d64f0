"""Serving of large models: caches, speculation, batching, adapters. The models are workloads, in `decoders`."""
