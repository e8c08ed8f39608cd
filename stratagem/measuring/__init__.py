"""What is measured all the time: its names, and what counts it in a process."""
