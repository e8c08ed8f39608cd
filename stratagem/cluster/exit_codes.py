"""Exit codes of tasks and jobs (docs/semantics.md, "Exit codes"). Pure, no I/O."""

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NO_RETRY, EXIT_PREEMPTED = 0, 1, 2, 42, 143
HOPELESS = (EXIT_USAGE, EXIT_NO_RETRY)
"""After which a restart of the task helps nobody."""
