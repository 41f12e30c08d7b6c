"""Checks that run the thing: the contract of a model, the installation."""
