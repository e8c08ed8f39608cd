"""Training throughput: the same model, batch, optimizer and threads under every system."""
