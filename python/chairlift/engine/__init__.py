"""The loop and what it runs on."""
