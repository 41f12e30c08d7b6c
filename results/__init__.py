"""Results that were really obtained, one JSON file for each cell of a table, found as resources of `spt.results`."""

if __name__ != "spt.results":
    raise ImportError("import spt.results, not results")
