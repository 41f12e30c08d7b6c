"""Time and memory of models, operations and data on this machine."""
