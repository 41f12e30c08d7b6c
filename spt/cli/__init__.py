"""The commands of `spt`."""
