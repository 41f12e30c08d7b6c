"""Disturb commands at random moments, let them finish, and hold the end against that of a day without trouble."""
