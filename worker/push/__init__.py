"""What of a worker talks to a ps: its client and lanes, gradients on their way, weights coming back, tables."""
