"""The user's own data: from files of several formats and layouts to three splits, with every complaint in words.

In reading order: options (what a recipe may say), places and hub (which files), tables, cells and arrays (what is in
them), rows and steps (examples of it), splits (who goes where), whole (the task), findings (what a reader should know).
"""
