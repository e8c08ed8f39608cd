"""What the chief tells people and Prometheus."""
