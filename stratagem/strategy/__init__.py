"""The strategies."""
