"""`python -m experts_server`: the same as `experts-server`."""

from experts_server.command.cli import main

main()
