"""The published generators of tasks, rewritten, and how they are compiled."""
