"""Vital signs from two waves."""
