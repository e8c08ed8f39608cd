"""Why a job is slow: what its tasks measured in, a verdict in one sentence out. Pure: no I/O, no clock."""
