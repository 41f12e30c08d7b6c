"""Running a study: here, by local workers, on Slurm; estimates and dry runs."""
