"""Generated gRPC stubs of ``proto/``. Do not edit: ``make proto`` writes them, ``make check`` compares."""
