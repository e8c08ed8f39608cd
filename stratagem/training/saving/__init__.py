"""Saving what a script has made: its objects and their states, who saves together, the newest that stay."""
