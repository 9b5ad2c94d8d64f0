"""Lower floating-point precision that torch itself offers: autocast, precision policies, TF32."""
