"""The worker role: what a training script uses to reach the chief and the parameter servers."""
