"""Tasks, one a file; the file's name is the name in a recipe. Imported as `spt.tasks.<name>`."""

if __name__ != "spt.tasks":  # in a checkout `import tasks` would find this folder and load everything twice
    raise ImportError("import spt.tasks, not tasks")
