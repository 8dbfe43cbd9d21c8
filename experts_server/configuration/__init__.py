"""What a server hosts and how, from a file, the environment and flags: checked, with every mistake named."""
