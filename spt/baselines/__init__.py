"""Answers to a task without a network: what a network has to beat. No torch here."""
