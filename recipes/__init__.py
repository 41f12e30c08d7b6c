"""Recipes, one experiment a YAML file, found as resources of `spt.recipes`."""

if __name__ != "spt.recipes":
    raise ImportError("import spt.recipes, not recipes")
