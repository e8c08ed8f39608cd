"""What every checkpoint on disk has in common, whoever writes or reads it: chief, ps or a training script."""
