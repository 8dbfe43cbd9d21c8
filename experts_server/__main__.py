"""`python -m experts_server`: the same as `experts-server`."""

from experts_server.cli import main

main()
