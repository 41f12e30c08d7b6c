"""The user's own data: from files of several formats and layouts to three splits; every error is one sentence.

In reading order: options (what a recipe may say), discovery (which files), tables, parsing and arrays (what is in
them), rows (from their rows to examples), static (what stands beside one), splits, assembly (the task), diagnostics
(what a user should know of the data).
"""
