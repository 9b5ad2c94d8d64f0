"""Lower precision that torch itself offers: autocast, policies, TF32. Formats with scales are in `quantization`."""
