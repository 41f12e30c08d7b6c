"""Recipes on real data, cut down to what two processor cores finish within the hour."""
