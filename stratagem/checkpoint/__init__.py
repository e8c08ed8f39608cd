"""What every checkpoint on disk has in common, whether a chief, a ps or a training script writes or reads it."""
