"""Reports: comparisons of finished runs, from their files alone. No torch here."""
