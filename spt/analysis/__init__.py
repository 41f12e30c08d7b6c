"""A look inside finished runs: kernels, attention, errors, differences."""
