"""The images, built and run: without a daemon, and without a registry."""
