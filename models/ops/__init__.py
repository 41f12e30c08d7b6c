"""The mathematics that sequence layers share: convolutions, kernels, scans, initial matrices, norms, output maps."""
