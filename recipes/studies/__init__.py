"""Studies that repeat tables and figures of the papers."""
