"""All-reduce: one job of real processes measures every size; the same loop and the same checks under every system."""
