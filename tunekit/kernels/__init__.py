"""Fused operations in Triton, each with its plain torch form. They stand alone: nothing else of tunekit is imported."""
