"""Injected faults (``stratagem run --chaos``): tasks killed, stopped and slowed, connections cut and reset."""
