"""What tasks make: laws of published generators, and how rows are made by several workers."""
