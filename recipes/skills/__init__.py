"""The DLR paper's atomic and higher-order tasks."""
