"""The chief: sessions, fencing, leases of units, clocks, checkpoint commits, status. Never in the data path."""
