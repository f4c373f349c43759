"""What makes things that the project ships; nothing here serves."""
