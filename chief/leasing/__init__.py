"""Which worker gets which unit, and when it may continue."""
