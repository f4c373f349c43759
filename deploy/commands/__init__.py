"""One file per command: ``add_parser`` declares its arguments, the function it sets runs it."""
