"""What the chief reports to people and Prometheus."""
