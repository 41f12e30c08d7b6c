"""Data sets: prepared splits, fingerprints, batches, summaries."""
