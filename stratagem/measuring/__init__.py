"""What is always measured: its names, and the counters of a process."""
