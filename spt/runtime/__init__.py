"""How and where a job runs: device, processes, signals, memory, trackers."""
