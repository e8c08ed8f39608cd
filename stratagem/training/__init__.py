"""Training without a loop of your own: Model, callbacks, checkpoints, export."""
