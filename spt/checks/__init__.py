"""Checks of a model's contract and of the installation, made by running them."""
