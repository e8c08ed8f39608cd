"""Why a job is slow: from the measures of its tasks to a verdict in one sentence. Pure: no I/O, no clock."""
