"""Run folders: their files, results and which of them belong together. No torch here."""
