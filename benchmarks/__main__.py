"""``python -m benchmarks NAME [OPTIONS]``: a table for people, JSON lines for programs."""

from __future__ import annotations

from benchmarks.commands import main

if __name__ == "__main__":
    main()
