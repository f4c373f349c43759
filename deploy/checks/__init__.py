"""What would not run, found before anything is started."""
