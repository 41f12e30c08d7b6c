"""Pendulum, sampled irregularly."""
