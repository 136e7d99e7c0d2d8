"""Entry points: the command line and the services that it starts."""
