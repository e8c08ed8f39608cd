"""What workers count and agree on."""
