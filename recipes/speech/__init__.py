"""Speech Commands, as raw samples."""
