"""Studies: what is varied, and which runs that takes. No torch here."""
