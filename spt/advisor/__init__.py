"""From a file to an answer: `spt try` finds the columns, keeps to a budget, and says what came of it.

In reading order: table (what columns hold), columns (what they are for), arrays (of NumPy as a table), backbones,
recipes (the files), budget (what fits), answer (in words), advise (all of it).
"""
