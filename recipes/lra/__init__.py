"""Long Range Arena tasks with our conventions."""
