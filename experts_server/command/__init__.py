"""The command line: `experts-server` and what it shows."""
