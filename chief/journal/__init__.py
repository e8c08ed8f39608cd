"""What a restarted chief must know."""
