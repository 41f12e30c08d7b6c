"""Recipes: schema, YAML, overrides, plug-ins, jobs, budgets. No torch here."""
