"""Backbones, one a file; the file's name is the name in a recipe. Imported as `spt.models.<name>`."""

if __name__ != "spt.models":  # in a checkout `import models` would find this folder and load everything twice
    raise ImportError("import spt.models, not models")
